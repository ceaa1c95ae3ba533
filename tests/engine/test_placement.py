"""Where the parts of a model go on machines that this one is not: the card's free memory is the only thing made up."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError, ErrorCode
from engine.runtime.placement import place, set_threads

GIB = 2**30


@pytest.fixture
def card_with_8_gib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 12 * GIB))


def test_without_a_card_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    placement = place(EngineConfig("m"), GIB, GIB)
    assert (placement.dense.type, placement.experts.type, placement.note) == ("cpu", "cpu", "")
    with pytest.raises(EngineError) as caught:
        place(EngineConfig("m", device="cuda"), GIB, GIB)
    assert caught.value.code is ErrorCode.DEVICE_UNAVAILABLE


@pytest.mark.usefixtures("card_with_8_gib_free")
def test_everything_on_the_card_if_it_fits() -> None:
    placement = place(EngineConfig("m"), 2 * GIB, 4 * GIB)
    assert (str(placement.dense), str(placement.experts), placement.note) == ("cuda:0", "cuda:0", "")


@pytest.mark.usefixtures("card_with_8_gib_free")
@pytest.mark.parametrize("config", [EngineConfig("m"), EngineConfig("m", device="cuda:0")])
def test_experts_in_ram_if_they_do_not_fit_and_it_is_said(config: EngineConfig) -> None:
    placement = place(config, 2 * GIB, 6 * GIB)
    assert (placement.dense.type, placement.experts.type) == ("cuda", "cpu")
    assert "Experts run on the CPU" in placement.note


@pytest.mark.usefixtures("card_with_8_gib_free")
def test_a_vram_budget_counts_like_a_smaller_card() -> None:
    assert place(EngineConfig("m", vram_bytes=3 * GIB), 2 * GIB, 4 * GIB).experts.type == "cpu"


@pytest.mark.usefixtures("card_with_8_gib_free")
def test_a_model_too_big_for_the_card() -> None:
    placement = place(EngineConfig("m"), 9 * GIB, 0)
    assert placement.dense.type == "cpu"
    assert "Runs on the CPU" in placement.note
    with pytest.raises(EngineError) as caught:
        place(EngineConfig("m", device="cuda"), 9 * GIB, 0)
    assert caught.value.code is ErrorCode.NOT_ENOUGH_MEMORY


@pytest.mark.usefixtures("card_with_8_gib_free")
def test_the_cpu_if_it_is_asked_for() -> None:
    assert place(EngineConfig("m", device="cpu"), GIB, GIB).dense.type == "cpu"


def test_threads_are_never_more_than_there_are() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1 == torch.get_num_threads()
        assert 1 <= set_threads(None) <= set_threads(10_000)
    finally:
        torch.set_num_threads(before)
