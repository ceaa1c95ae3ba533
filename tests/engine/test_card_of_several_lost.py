"""One of several cards stops responding: answers go on on the others, and one sentence says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.common.config import EngineConfig
from engine.common.model_info import ModelInfo
from engine.devices.opening import open_devices
from engine.runtime.engine import Engine
from tests.engine.on_devices import MIB, PROMPT, Reference, reference
from tests.engine.test_lost_card import ask, tokens


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield reference("qwen3_moe", tmp_path_factory.mktemp("several"))
    reference.cache_clear()


@pytest.mark.parametrize(
    ("cards", "lost", "sharing"),
    [
        (2, 1, "experts"),
        (3, 0, "experts"),
        (2, 1, "layers"),
        pytest.param(2, 0, "layers", marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_go_on(cards: int, lost: int, sharing: str, expected: Reference) -> None:
    engine, moved = Engine(), list[ModelInfo]()
    engine.on_moved = moved.append
    config = EngineConfig(
        str(expected.folder),
        device=f"emulated:slow-linkx{cards}",
        vram_bytes=8 * MIB,
        precision="fp32",
        threads=1,
        cache_slots=5,
        sharing=sharing,  # type: ignore[arg-type]
    )
    engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        assert engine._loaded is not None
        assert engine._loaded.devices is not None
        assert engine._way_back is not None
        engine._way_back._prove = lambda: None
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        engine._loaded.devices.devices[lost].close()
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        assert engine.info is not None
        left = [f"emulated:slow-link#{index}" for index in range(cards) if index != lost]
        assert engine.info.device == ", ".join(left)
        gone = f"emulated:slow-link#{lost} stopped responding, so the model runs on {' and '.join(left)} now."
        assert engine.info.device_note.startswith(gone)
        assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
        for device in engine._loaded.devices.devices:
            device.close()
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        assert engine.info.device == "cpu"
        assert "stopped responding" in engine.info.device_note
    finally:
        engine.unload()


def test_cards_can_be_named_one_by_one() -> None:
    devices = open_devices("emulated:slow-link#2,emulated:slow-link#5")
    try:
        assert [device.name for device in devices] == ["emulated:slow-link#2", "emulated:slow-link#5"]
        assert [device.index for device in devices] == [2, 5]
    finally:
        for device in devices:
            device.close()
