"""Where the parts of a model go: on emulated cards, whose memory is counted like a real one's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.devices.emulated import open_emulated
from engine.errors import EngineError, ErrorCode
from engine.hardware.profiles import DeviceProfile
from engine.runtime.placement import ModelNeeds, open_compute_devices, place, set_threads

MIB = 2**20
CONTEXT = 2048


@contextmanager
def cards(*sizes: int) -> Iterator[list[Device]]:
    profile = DeviceProfile("card", "", 1000 * MIB, 10.0, 10.0, 1.0)
    opened = [open_emulated(profile, index, size) for index, size in enumerate(sizes)]
    try:
        yield opened
    finally:
        for device in opened:
            device.close()


def needs(*dense: int, experts: int = 0, kv: int = 0, activations: int = 0) -> ModelNeeds:
    return ModelNeeds(dense, experts, kv, activations)


def test_without_a_card_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_compute_devices(EngineConfig("m")) == open_compute_devices(EngineConfig("m", device="cpu")) == []
    placement = place(EngineConfig("m"), [], needs(MIB), CONTEXT)
    assert (placement.dense.type, placement.experts.type, placement.note) == ("cpu", "cpu", "")
    with pytest.raises(EngineError) as caught:
        open_compute_devices(EngineConfig("m", device="cuda"))
    assert caught.value.code is ErrorCode.DEVICE_UNAVAILABLE


def test_everything_on_the_card_if_it_fits_with_its_context() -> None:
    with cards(8 * MIB) as devices:
        config = EngineConfig("m", device="emulated:card")
        assert place(config, devices, needs(2 * MIB, experts=4 * MIB), CONTEXT).all_experts
        assert not place(config, devices, needs(2 * MIB, experts=6 * MIB + 1), CONTEXT).all_experts
        assert not place(config, devices, needs(2 * MIB, experts=4 * MIB, kv=MIB // 512), CONTEXT).all_experts
        assert place(config, devices, needs(8 * MIB), CONTEXT).all_experts


@pytest.mark.parametrize("wish", [{"cache_slots": 3}, {"misses": "cpu"}])
def test_who_asks_for_a_cache_gets_one(wish: dict[str, object]) -> None:
    with cards(8 * MIB) as devices:
        assert not place(EngineConfig("m", **wish), devices, needs(MIB, experts=MIB), CONTEXT).all_experts  # type: ignore[arg-type]


def test_experts_of_several_cards_are_cached() -> None:
    with cards(8 * MIB, 8 * MIB) as devices:
        placement = place(EngineConfig("m"), devices, needs(MIB, MIB, experts=MIB), CONTEXT)
        assert placement.devices == tuple(devices)
        assert not placement.all_experts


@pytest.mark.parametrize("dense", [(9 * MIB, 0), (MIB, 5 * MIB)])
def test_a_model_too_big_for_a_card_runs_on_the_cpu_and_it_is_said(dense: tuple[int, int]) -> None:
    with cards(8 * MIB, 4 * MIB) as devices:
        placement = place(EngineConfig("m"), devices, needs(*dense), CONTEXT)
        assert placement.devices == ()
        assert placement.dense.type == "cpu"
        assert "Runs on the CPU" in placement.note


def test_pieces_of_a_prompt_are_as_long_as_their_activations_allow() -> None:
    with cards(8 * MIB) as devices:
        lengths = [
            place(EngineConfig("m"), devices, needs(0, activations=each), 10**6).piece_tokens
            for each in (1, 2048, 32768)
        ]
        assert lengths == [2048, 1024, 64]
        assert place(EngineConfig("m"), devices, needs(0, activations=1), 100).piece_tokens == 100


def test_threads_are_never_more_than_there_are() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1 == torch.get_num_threads()
        assert 1 <= set_threads(None) <= set_threads(10_000)
    finally:
        torch.set_num_threads(before)
