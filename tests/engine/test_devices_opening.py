"""From what a user writes to devices, threads, and the layers of each."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.devices.opening import open_devices
from engine.hardware.profiles import profile_names, read_profile
from engine.planner.placement import split_layers
from engine.runtime.decoder_layers import LayerDevices, layer_names, move_between
from engine.runtime.load.model import open_compute_devices, set_threads
from tests.engine.tiny_families import tiny_model
from tests.refusals import refused

no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("cpu", ["cpu"]),
        ("emulated:slow-link", ["emulated:slow-link#0"]),
        ("emulated:slow-linkx1", ["emulated:slow-link#0"]),
        ("emulated:slow-linkx2", ["emulated:slow-link#0", "emulated:slow-link#1"]),
        ("emulated:pcie3-x8-8gbx2", ["emulated:pcie3-x8-8gb#0", "emulated:pcie3-x8-8gb#1"]),
        ("emulated:slow-link,emulated:pcie3-x8-8gb", ["emulated:slow-link#0", "emulated:pcie3-x8-8gb#0"]),
    ],
)
def test_devices_by_name(spec: str, names: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(device) for device in open_devices(spec)]
        assert [device.name for device in devices] == names
        assert len({id(device.memory) for device in devices}) == len(devices)
        assert all(device.torch_device.type == "cpu" for device in devices)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_opens_with_its_memory_or_less(name: str) -> None:
    for vram, expected in ((None, read_profile(name).vram_bytes), (1000, 1000)):
        (device,) = open_devices(f"emulated:{name}", vram)
        with device:
            assert device.memory.total == expected


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "emulated:NAME"),
        ("CPU", "'CPU'"),
        ("cpu:0", "'cpu:0'"),
        ("cuda:", "'cuda:'"),
        ("cuda:x", "'cuda:x'"),
        ("cuda:²", "cuda:²"),
        ("emulated", "slow-link"),
        ("emulated:", "slow-link"),
        ("emulated:nothing", "'nothing'.*slow-link"),
        ("emulated:nothingx2", "'nothingx2'"),
        ("emulated:../slow-link", "'../slow-link'"),
        ("emulated:slow-linkx0", "0 devices: use 1 to 8"),
        ("emulated:slow-linkx9", "9 devices"),
        ("emulated:slow-linkx99999", "99999 devices"),
        ("emulated:slow-link,emulated:slow-link", "a card twice: several alike are NAMEx2"),
        ("emulated:slow-link,emulated:link8-4gb", "cards with a data sheet stand beside no others"),
    ],
)
def test_names_that_nothing_has(spec: str, says: str) -> None:
    with refused(ErrorCode.INVALID_REQUEST, match=says):
        open_devices(spec)


@no_card
@pytest.mark.parametrize("spec", ["cuda", "cuda:0", "cuda:7"])
def test_a_card_that_is_not_there(spec: str) -> None:
    with refused(ErrorCode.DEVICE_UNAVAILABLE, match="cpu"):
        open_devices(spec)


def split(sizes: Mapping[str, int], capacities: Sequence[int]) -> LayerDevices:
    layers = layer_names(_MODEL)
    return layers.on(split_layers(*layers.sums(sizes), capacities))


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=4), st.integers(0, 10**6))
def test_runs_cover_all_layers_in_order(capacities: list[int], elsewhere: int) -> None:
    sizes = {name: parameter.nbytes for name, parameter in _MODEL.named_parameters()}
    sizes["model.embed_tokens.weight"] = elsewhere
    layers = split(sizes, capacities)
    assert layers.prefix == "model.layers."
    assert len(layers.of_layer) == 6
    assert list(layers.of_layer) == sorted(layers.of_layer)
    assert set(layers.of_layer) <= set(range(len(capacities)))
    assert layers.of("model.embed_tokens.weight") == layers.of("lm_head.weight") == 0
    for index, device in enumerate(layers.of_layer):
        assert layers.of(f"model.layers.{index}.mlp.experts") == layers.of_cache_layer(index) == device


def test_even_devices_get_even_shares() -> None:
    sizes = {f"model.layers.{layer}.weight": 100 for layer in range(6)}
    assert split(sizes, [10, 10]).of_layer == (0, 0, 0, 1, 1, 1)
    assert split(sizes, [10, 20]).of_layer == (0, 0, 1, 1, 1, 1)
    assert split(sizes, [10, 10, 10]).of_layer == (0, 0, 1, 1, 2, 2)
    # The embedding is with the first, which has room for fewer layers then.
    assert split({**sizes, "lm_head.weight": 200}, [10, 10]).of_layer == (0, 0, 1, 1, 1, 1)


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def forward(self, hidden: torch.Tensor, *, angles: tuple[torch.Tensor, torch.Tensor], mask: Any) -> torch.Tensor:
        self.given.append((*angles, mask))
        return torch.zeros_like(hidden, device="cpu")  # what a device without memory holds cannot come back


class _Stack(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(count))

    def forward(
        self, hidden: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], masks: list[Any]
    ) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, angles=angles, mask=masks[number % len(masks)])
        return hidden


def test_angles_and_masks_are_copied_once_for_each_card() -> None:
    # The device without memory stands for a second card: which tensors arrive can be seen, not what is in them.
    here, there = torch.device("cpu"), torch.device("meta")
    model = _Stack(7)
    move_between(model, LayerDevices("layers.", (0, 0, 1, 1, 1, 1, 1)), [here, there])
    angles, masks = (torch.zeros(3), torch.ones(3)), [torch.zeros(2, 2), torch.ones(2, 2)]
    with torch.inference_mode():
        for _ in range(2):  # the same tensors again, with other numbers perhaps
            model(torch.zeros(1), angles, masks)
    given = [layer.given for layer in model.layers]
    assert all(tensor.device == here for each in given[:2] for call in each for tensor in call)
    for turn in range(2):
        moved = [call[turn] for call in given[2:]]
        assert all(tensor.device == there for call in moved for tensor in call)
        assert len({id(call[0]) for call in moved}) == len({id(call[1]) for call in moved}) == 1
        assert len({id(call[2]) for call in moved}) == len(masks)
    assert given[2][0][0] is not given[2][1][0]


_MODEL = tiny_model("mixtral", num_hidden_layers=6)


def test_without_a_card_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert open_compute_devices(EngineConfig("m"))[0] == open_compute_devices(EngineConfig("m", device="cpu"))[0] == []
    with refused(ErrorCode.DEVICE_UNAVAILABLE):
        open_compute_devices(EngineConfig("m", device="cuda"))


def test_threads_are_never_more_than_there_are() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1 == torch.get_num_threads()
        assert 1 <= set_threads(None) <= set_threads(10_000)
    finally:
        torch.set_num_threads(before)
