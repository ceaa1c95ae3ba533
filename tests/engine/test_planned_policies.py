"""Every policy that a plan may offer: the engine loads a model with its settings, on a card, and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig, SamplingParams
from engine.planner.plan_search import ENGINE_SETTINGS
from engine.runtime.load.model import load_model
from tests.engine.single_streams import Alone

MIB = 2**20
CARD = "emulated:slow-link"
VRAM = 96 * MIB


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    return make_synthetic("synthetic:qwen3-moe-small?layers=2&experts=16&vocab=1024")


@pytest.mark.parametrize("policy", ["Switchyard mixed", "CPU-GPU collaborative", "whole-layer prefetch"])
def test_it_is_carried_out(policy: str, folder: Path) -> None:
    answer_with(policy, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ENGINE_SETTINGS)
@pytest.mark.parametrize("ways", [None, 4])
def test_each_is_carried_out(policy: str, ways: int | None, folder: Path) -> None:
    answer_with(policy, folder, ways)


def answer_with(policy: str, folder: Path, ways: int | None = None) -> None:
    """A few tokens, with what `Plan.engine_config` makes of the policy."""
    settings = {"device": CARD, "vram_bytes": VRAM, "cache_ways": ways, **ENGINE_SETTINGS[policy]}
    config = EngineConfig(str(folder), precision="bf16", threads=1, context_tokens=128, **settings)
    loaded = load_model(config, on_progress=lambda _done, _all: None, cancelled=lambda: False)
    try:
        assert (loaded.info.device == "cpu") == (settings["device"] == "cpu"), loaded.info.device_note
        session = Alone(loaded)
        answer = session.generate_from_ids([5, 6, 7], SamplingParams(max_tokens=4), end_ids=frozenset())
        assert answer.generated_tokens == 4
        session.clear()
    finally:
        loaded.close()
