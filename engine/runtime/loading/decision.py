"""What is decided before a weight is read: precision, devices, and where experts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import EngineConfig
from engine.experts.sites import ExpertsSite, quantised
from engine.kernels.dense import is_held_quantised, quantised_sizes
from engine.kernels.quantised.tiles import PRECISIONS
from engine.planner.precision import careful_precision
from engine.runtime.expert_placement import ExpertPlacement, place_experts
from engine.runtime.fill_bank import working_bytes
from engine.runtime.layer_devices import split_layers
from engine.runtime.loading.opened import OpenedCheckpoint
from engine.runtime.memory import require_ram, usable_ram
from engine.runtime.model_devices import ModelDevices
from engine.runtime.placement import ModelNeeds, Placement, place
from engine.runtime.precision_choice import Footprint, choose_precision
from engine.runtime.prefill_pieces import activation_bytes


@dataclass(frozen=True)
class Decision:
    """How a model is going to be held.

    Attributes:
        precision: of its weights.
        sites: its experts modules in that precision.
        dense_sizes: bytes of every tensor but experts, by name, as they will be held.
        dense_parameters: how many numbers they are.
        notes: sentences for the user; some may be empty.
    """

    precision: str
    sites: list[ExpertsSite]
    placement: Placement
    needs: ModelNeeds
    experts: ExpertPlacement
    dense_sizes: dict[str, int]
    dense_parameters: int
    notes: tuple[str, ...]

    @property
    def uses_cpu(self) -> bool:
        """Whether some of it is computed there."""
        return "cpu" in (self.placement.dense.type, self.placement.experts.type)


def decide(opened: OpenedCheckpoint, config: EngineConfig, devices: ModelDevices) -> Decision:
    """Weighs what the model needs against what the devices and the machine have; splits layers between devices.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`: it fits nowhere.
    """
    context = opened.context_tokens(config)
    precision, why = _precision(opened, config, devices, context)
    sites = _in_precision(opened, precision)
    sizes = _dense_sizes(opened, precision, devices)
    needs = _needs(opened, sites, sizes, devices)
    placement = place(config, devices.devices, needs, context)
    if devices.devices and not placement.devices:  # it will be held as the CPU holds it
        sizes = _dense_sizes(opened, "bf16", devices)
        needs = _needs(opened, sites, sizes, devices)
    working = working_bytes(opened.plan, sites)
    if placement.devices and dense_on_cards(opened, [placement.dense], precision) is not None:
        working += sum(_dense_sizes(opened, "bf16", devices).values())  # quantised in RAM, on its way to the cards
    experts = _place_experts(opened, config, sites, placement, needs, working)
    return Decision(
        precision, sites, placement, needs, experts, sizes, _dense_parameters(opened), (why, placement.note)
    )


def _precision(opened: OpenedCheckpoint, config: EngineConfig, devices: ModelDevices, context: int) -> tuple[str, str]:
    """The precision asked for, or that which `auto` turns out to be and why."""
    if config.precision != "auto":
        return config.precision, ""
    if not opened.sites:
        return "bf16", ""
    footprints = []
    for precision in ("bf16", *PRECISIONS):
        sites = _in_precision(opened, precision)
        needs = _needs(opened, sites, _dense_sizes(opened, precision, devices), devices)
        placement = place(config, devices.devices, needs, context)
        dense = sum(needs.dense) if placement.dense.type == "cpu" else 0
        experts = needs.experts if placement.experts.type == "cpu" else 0
        footprints.append(Footprint(precision, dense + experts + working_bytes(opened.plan, sites)))
    return choose_precision(footprints, usable_ram(config.ram_bytes))


def _in_precision(opened: OpenedCheckpoint, precision: str) -> list[ExpertsSite]:
    return quantised(opened.sites, precision, opened.weights) if precision in PRECISIONS else opened.sites


def _needs(
    opened: OpenedCheckpoint, sites: list[ExpertsSite], sizes: dict[str, int], devices: ModelDevices
) -> ModelNeeds:
    capacities = [device.memory.total for device in devices.devices]
    devices.layers = split_layers(opened.model, _tensor_sizes(opened.model), capacities)
    dense = [0] * max(len(devices.devices), 1)
    for name, nbytes in sizes.items():
        dense[devices.layers.of(name)] += nbytes
    return ModelNeeds(
        dense=tuple(dense),
        experts=sum(site.nbytes for site in sites),
        kv=opened.profile.kv_elements_per_token * opened.dtype.itemsize,
        activations=activation_bytes(opened.profile, opened.dtype),
    )


def _place_experts(
    opened: OpenedCheckpoint,
    config: EngineConfig,
    sites: list[ExpertsSite],
    placement: Placement,
    needs: ModelNeeds,
    working: int,
) -> ExpertPlacement:
    dense_in_ram = sum(needs.dense) if placement.dense.type == "cpu" else 0
    if placement.experts.type == "cpu":
        per_token = opened.profile.experts_per_token
        return place_experts(opened.name, sites, dense_in_ram, working, per_token, config.ram_bytes)
    require_ram(opened.name, dense_in_ram + working, config.ram_bytes)
    return ExpertPlacement(sites, [])


def dense_on_cards(opened: OpenedCheckpoint, places: Sequence[torch.device], precision: str) -> str | None:
    """The precision of linear layers on these devices, if they are to be quantised there."""
    if precision not in PRECISIONS or not places or not all(is_held_quantised(place) for place in places):
        return None
    return careful_precision(precision, opened.weights)


def _dense_sizes(opened: OpenedCheckpoint, precision: str, devices: ModelDevices) -> dict[str, int]:
    """Bytes of every tensor but experts, as they will be held."""
    experts = {target for site in opened.sites for target in site.targets}
    sizes = {name: nbytes for name, nbytes in _tensor_sizes(opened.model).items() if name not in experts}
    on_cards = dense_on_cards(opened, [device.torch_device for device in devices.devices], precision)
    return sizes if on_cards is None else quantised_sizes(opened.model, on_cards, sizes)


def _dense_parameters(opened: OpenedCheckpoint) -> int:
    experts = {target for site in opened.sites for target in site.targets}
    elsewhere = experts.union(getattr(opened.model, "all_tied_weights_keys", None) or ())
    return sum(p.numel() for name, p in opened.model.named_parameters() if name not in elsewhere)


def _tensor_sizes(model: Any) -> dict[str, int]:
    """Bytes of every tensor by name; tied weights are counted once, as they will be held."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    sizes = {name: p.nbytes for name, p in model.named_parameters() if name not in tied}
    return {**sizes, **{name: buffer.nbytes for name, buffer in model.named_buffers()}}
