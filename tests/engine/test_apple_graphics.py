"""Apple's graphics: a whole model where it lies, or the CPU; with a fake in the place of `torch.mps`."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.devices import opening as mps
from engine.devices.card import HEADROOM_BYTES, CardKind, hard_fraction, open_card
from engine.devices.memory_budget import MemoryCategory
from engine.devices.opening import CARD_KINDS, MPS, AppleCards, automatic, open_automatic, open_devices
from engine.kernels.gpu.proof import why_not
from engine.planner.placement import Budgets, DeviceBudget, Experts, NoteCode, Sizes, Weights, resolve
from engine.runtime.load.devices import left_note, left_to_cpu
from engine.verbs.options import device_name
from tests.engine.loaded_tiny import open_model
from tests.engine.on_devices import PROMPT, Reference, answer, chatting, reference
from tests.fake_cards import GIB, FakeApple, FakeCards


def kind(fake: FakeApple) -> CardKind:
    return replace(MPS, name="cpu", torch=AppleCards(fake))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield reference("qwen3_moe", tmp_path_factory.mktemp("apple"))
    reference.cache_clear()


def load(expected: Reference, **config: Any) -> Any:
    return open_model(expected.folder, **{"device": "mps", "precision": "fp32", **config})


@pytest.mark.parametrize("config", [{}, {"misses": "fetch"}, {"cache_slots": 3}], ids=str)
def test_answers_with_all_experts_in_place(
    monkeypatch: pytest.MonkeyPatch, expected: Reference, config: dict[str, Any]
) -> None:
    fake = FakeApple()
    monkeypatch.setitem(CARD_KINDS, "mps", kind(fake))
    with closing(load(expected, **config)) as model:
        assert model.devices.experts.all_caches == []
        assert model.graph_device is None
        use = model.devices.devices[0].memory.use()
        assert use.by_category[MemoryCategory.STAGING] == use.by_category[MemoryCategory.ACTIVATIONS] == 0
        with chatting(model) as session:
            assert list(answer(session, PROMPT).token_ids) == expected.first
            assert list(answer(session, expected.second_prompt).token_ids) == expected.second


def test_a_model_that_does_not_fit_whole_runs_on_the_cpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    monkeypatch.setitem(CARD_KINDS, "mps", kind(FakeApple()))
    with closing(load(expected, vram_bytes=300_000)) as model:
        assert model.info.device == "cpu"
        assert "Runs on the CPU: with its experts, all of which have to lie there" in model.info.device_note
        with chatting(model) as session:
            assert list(answer(session, PROMPT).token_ids) == expected.first


def test_the_budget_is_what_the_system_recommends_and_ram_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "available_ram", lambda: 100 * GIB)
    fake = FakeApple(most=12 * GIB, held=GIB)
    with open_card(kind(fake)) as device:
        assert device.memory.total == 11 * GIB - HEADROOM_BYTES
        assert fake.fraction == hard_fraction(device.memory.total, 12 * GIB)
        assert device.is_unified
        assert device.watch is None
    monkeypatch.setattr(mps, "available_ram", lambda: 4 * GIB)
    with open_card(kind(fake)) as device:
        assert device.memory.total == 4 * GIB - HEADROOM_BYTES
    with open_card(kind(FakeApple(most=GIB // 4)), vram_bytes=0) as device:
        assert device.memory.total == 0


def test_it_is_used_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "xpu"):
        monkeypatch.setitem(CARD_KINDS, name, replace(CARD_KINDS[name], torch=FakeCards(names=[]), variables=()))
    monkeypatch.setitem(CARD_KINDS, "mps", kind(FakeApple()))
    assert automatic() == "cpu"
    assert open_automatic() == ([], "")
    assert device_name("mps") == "mps"
    (device,) = open_devices("mps")
    assert device.is_unified
    device.close()
    assert "Apple" in (why_not(torch.device("mps")) or "")


@pytest.mark.skipif(sys.platform == "darwin", reason="there may be one")
def test_elsewhere_there_is_none() -> None:
    assert MPS.count() == 0
    with pytest.raises(EngineError, match="no graphics card that torch can use"):
        open_devices("mps")


def test_operators_that_the_cpu_computes_are_named_once() -> None:
    left: list[str] = []

    def compute() -> None:
        with left_to_cpu() as found:
            say()
        left.extend(found)

    def say() -> None:
        for name in ("aten::histc", "aten::kthvalue.values", "aten::histc"):
            warnings.warn(
                f"The operator '{name}' is not currently supported on the MPS backend and will fall back to run on the "
                "CPU. This may have performance implications.",
                stacklevel=1,
            )
        warnings.warn("something else", stacklevel=1)

    with pytest.warns(UserWarning, match="something else"):
        compute()
    assert left == ["aten::histc", "aten::kthvalue.values"]
    assert left_note(left).endswith("as these graphics cannot: aten::histc, aten::kthvalue.values.")
    assert left_note([]) == ""


def test_a_plan_has_all_experts_there_or_nothing() -> None:
    weights = Weights("int4", (10, 10), 20, 40, (Experts(30, 4, 0), Experts(30, 4, 1)))
    sizes = Sizes("m", (weights,), (130, 130), 20, 0, 0, 8, 2)
    ample = DeviceBudget("mps:0", 1000, 1000, is_unified=True)
    config = EngineConfig("m", cache_slots=2)
    placed = resolve(config, Budgets(10**12, None, (ample,)), sizes)
    assert (placed.all_experts, placed.slots, placed.notes) == (True, 8, ())
    tight = replace(ample, total=279, free=279)
    placed = resolve(config, Budgets(10**12, None, (tight,)), sizes)
    assert (placed.devices, [note.code for note in placed.notes]) == ((), [NoteCode.NO_SLOTS])
    assert placed.notes[0].needed == 280
    usual = resolve(config, Budgets(10**12, None, (replace(tight, is_unified=False),)), sizes)
    assert 0 < usual.slots < 8


def test_work_is_done_when_its_event_is() -> None:
    fake = FakeApple()
    with open_card(kind(fake)) as device:
        event = device.compute_stream.submit(lambda: None)
        assert event.done()
        assert fake.synchronized == 1
        source, there = torch.ones(3), torch.zeros(3)
        device.h2d_stream.copy(there, source).wait()
        assert there.tolist() == [1, 1, 1]
        assert device.responds()
