"""Random budgets, contexts, precisions and models: what is planned for a card is loaded there and never runs out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.checkpoint.find_shape import find_shape
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.devices.memory_budget import MemoryCategory
from engine.hardware.machine import CpuProfile, GpuProfile, HardwareProfile, LinkProfile
from engine.planner.plan import make_plan
from engine.planner.plan_parts import CHAT, Limits, Plan
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.engine.on_devices import memory_use
from tests.engine.single_streams import Alone

MIB = 2**20
CARD = "emulated:slow-link"
MODELS = (
    "synthetic:qwen3-moe-small?layers=2&experts=16&vocab=1024",
    "synthetic:qwen3-moe-small?layers=3&experts=24&vocab=512",
    "synthetic:qwen3-moe-tiny?layers=3",
    "synthetic:qwen3-moe-tiny?layers=2&experts=64&vocab=2048",
)
BATCHES, CASES = 20, 10
PADDING = MIB // 4
"""What tiles and pages add to models so small; in real ones it does not show."""


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_plan_runs_out_of_memory(batch: int) -> None:
    draw = random.Random(batch)
    loaded_there = 0
    for _ in range(CASES):
        loaded_there += _case(draw)
    assert loaded_there  # else nothing was tried


def test_a_few_of_them() -> None:
    draw = random.Random(1000)
    assert sum(_case(draw) for _ in range(5))


def _case(draw: random.Random) -> bool:
    """Whether the plan uses the card."""
    folder = make_synthetic(draw.choice(MODELS))
    shape = find_shape(str(folder))
    whole = 2 * shape.total_weights
    context = draw.choice((None, 64, 200, 700, 2000))
    limits = Limits(
        vram_bytes=max(MIB // 4, round(whole * draw.uniform(0.1, 2.0)) + draw.randrange(8 * MIB)),
        ram_bytes=None if draw.random() < 0.7 else round(whole * draw.uniform(0.4, 2.0)) + 4 * MIB,
        threads=1,
        context_tokens=context,
        precision=draw.choice(("auto", "bf16", "int8", "int4")),
    )
    try:
        plan = make_plan(_machine(), shape, CHAT, limits)
    except EngineError as error:
        assert error.code is ErrorCode.NOT_ENOUGH_MEMORY  # noqa: PT017 - most cases do not raise
        return False
    said = f"{folder.name}, {limits}, {plan.policy}, {plan.precision}"
    config = plan.engine_config(str(folder), CARD)
    loaded = load_model(config, on_progress=lambda _done, _all: None, cancelled=lambda: False)
    try:
        on_card = plan.card is not None
        assert (loaded.info.device != "cpu") == on_card, f"{said}: {loaded.info.device_note}"
        _converse(loaded, draw)
        _hold(plan, loaded, said)
    finally:
        loaded.close()
    return on_card


def _converse(loaded: LoadedModel, draw: random.Random) -> None:
    """A long prompt, and all that then fits, at most so much that it takes no minutes."""
    session = Alone(loaded)
    room = loaded.context_tokens
    vocabulary = loaded.model.config.get_text_config().vocab_size
    length = min(draw.choice((8, 150, 600)), room - 4)
    ids = [draw.randrange(3, vocabulary) for _ in range(length)]
    session.generate_from_ids(ids, SamplingParams(max_tokens=min(12, room - length)), end_ids=frozenset())
    session.clear()


def _hold(plan: Plan, loaded: LoadedModel, said: str) -> None:
    """Weights and experts are what the plan says, in each tier."""
    in_ram = loaded.info.experts_bytes
    if plan.card is not None:
        used = memory_use(loaded)[0].by_category
        experts = used[MemoryCategory.EXPERTS] + used[MemoryCategory.STAGING]
        assert plan.card.weights == pytest.approx(used[MemoryCategory.WEIGHTS], rel=0.05, abs=PADDING), said
        assert plan.card.experts + plan.card.staging == pytest.approx(experts, rel=0.05, abs=PADDING), said
    if plan.card is None or not plan.cache.all_experts:
        assert plan.ram.experts == pytest.approx(in_ram, rel=0.05, abs=PADDING), said
    if plan.card is None:
        assert plan.ram.weights == pytest.approx(loaded.info.weights_bytes, rel=0.05, abs=PADDING), said


def _machine() -> HardwareProfile:
    return HardwareProfile(
        "test",
        "",
        "",
        GpuProfile(CARD, 256 * MIB, 1e12, 1e11),
        LinkProfile(2e9, 2e9, 2e9),
        CpuProfile("", 2, 1e10, 3e9, 24 * 2**30),
        1e9,
    )


@pytest.fixture(autouse=True, scope="module")
def one_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints are made once."""
    home = tmp_path_factory.mktemp("planned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_HOME", str(home))
        for model in MODELS:
            make_synthetic(model)
    return home


@pytest.fixture(autouse=True)
def its_home(one_home: Path, monkeypatch: pytest.MonkeyPatch, switchyard_home: Path) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(one_home))
