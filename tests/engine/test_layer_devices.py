"""Decoder layers over several devices: consecutive, every one somewhere, in proportion to what each holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.placement import split_layers
from engine.runtime.decoder_layers import LayerDevices, layer_names, move_between
from tests.engine.tiny_families import tiny_model


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
