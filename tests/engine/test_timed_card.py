"""Models on cards whose time is modelled: the same tokens, and times that can be repeated."""

from pathlib import Path

import pytest

from engine.bench.opened import decode_seconds, prefill_seconds, random_text
from engine.common import clock
from engine.common.collector import without_collector
from tests.engine.on_devices import MIB, NEW_TOKENS, PROMPT, answer, chatting, opened, reference

CARD = "emulated:link8-4gb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference("qwen3_moe", tmp_path_factory.mktemp("timed")).folder


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("misses", ["mixed", "cpu", "fetch", "off", "layer"])
@pytest.mark.parametrize("host", ["", "?host=fixed"])
def test_answers_are_those_of_the_processor(folder: Path, misses: str, host: str, tmp_path: Path) -> None:
    expected = reference("qwen3_moe", tmp_path).first
    with opened(folder, device=CARD + host, misses=misses, cache_slots=6) as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected
        assert "modelled" in model.info.device_note
        assert clock.own is not None
    assert clock.own is None


def test_experts_that_are_all_on_the_card(folder: Path, tmp_path: Path) -> None:
    with opened(folder, device=CARD, vram_bytes=64 * MIB) as model, chatting(model) as session:
        assert not model.caches
        assert list(answer(session, PROMPT).token_ids) == reference("qwen3_moe", tmp_path).first


def test_times_can_be_repeated(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(100, 20, NEW_TOKENS)

    def run(home: str) -> tuple[list[float], float]:
        monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / home))  # which experts were used is kept
        with opened(folder, device=f"{CARD}?host=fixed", cache_slots=6) as model, without_collector():
            return decode_seconds(model, text), prefill_seconds(model, text.prompt)

    first, second = run("first"), run("second")
    assert first[0] == pytest.approx(second[0], rel=1e-9)
    assert first[1] == pytest.approx(second[1], rel=1e-9)
    assert all(step > 0 for step in first[0])
