"""What is decided before a weight is read: the checkpoint's sizes are counted, and `engine.planner.placement` decides.

A `Decision` is carried out by the rest of loading and changes nothing that it was made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.stored import precisions_of
from engine.common.config import EngineConfig
from engine.common.footprint import activation_token_bytes
from engine.devices.device import Device
from engine.devices.host_memory import available_ram
from engine.experts.disk_backed import can_be_disk_backed
from engine.experts.early_reads import EARLY_READS
from engine.experts.sites import ExpertsSite
from engine.formats import AUTO, LADDER, STORED, careful, format_of
from engine.kernels.dense import is_held_quantised, quantised_sizes
from engine.planner.placement import Budgets, DeviceBudget, Experts, Placement, Sizes, Weights
from engine.planner.placement import decide as decide_placement
from engine.runtime.decoder_layers import LayerDevices, LayerNames, layer_names
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.fill_bank import working_bytes
from engine.runtime.load.in_place import MatricesOnCards, matrices_in_place, types_in_place
from engine.runtime.load.stored import StoredLinears, sites_in

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Decision:
    """How a model is going to be held.

    Attributes:
        placement: what lies where, and in which precision.
        devices: that it runs on; none if that is the CPU alone.
        layers: what is on which of them.
        sites: its experts modules in that precision.
        dense_sizes: bytes of every tensor but experts, by name, as they will be held.
        dense_parameters: how many numbers they are.
        in_place: types of the experts, linear layers and embeddings that are used as they lie in the model's files, on
            an emulated device experts alone; none if that is not done.
    """

    placement: Placement
    devices: tuple[Device, ...]
    layers: LayerDevices
    sites: list[ExpertsSite]
    dense_sizes: dict[str, int]
    dense_parameters: int
    in_place: frozenset[str] = frozenset()

    @property
    def precision(self) -> str:
        """Of the weights."""
        return self.placement.precision

    @property
    def dense(self) -> torch.device:
        """Where what is not split between devices is."""
        return self.devices[0].torch_device if self.devices else _CPU

    @property
    def experts(self) -> torch.device:
        """Where the bank is that all experts are in."""
        return self.dense if self.placement.all_experts else _CPU

    @property
    def experts_elsewhere(self) -> dict[str, torch.device]:
        """Modules whose records are on a device other than the first, where devices have all of them."""
        if not self.placement.all_experts:
            return {}
        found = {site.name: self.layers.of(site.name) for site in self.sites}
        return {name: self.devices[index].torch_device for name, index in found.items() if index}

    @property
    def on_disk(self) -> list[ExpertsSite]:
        """Experts modules whose records come into slots in RAM from disk."""
        return [site for site in self.sites if can_be_disk_backed(site)] if self.placement.on_disk else []

    @property
    def resident(self) -> list[ExpertsSite]:
        """Experts modules all of whose records are held, in RAM or on the device."""
        return [site for site in self.sites if not (self.placement.on_disk and can_be_disk_backed(site))]

    @property
    def activations(self) -> list[int]:
        """Bytes of each device that a chunk of a prompt may take."""
        return [device.activations for device in self.placement.devices]

    @property
    def uses_cpu(self) -> bool:
        """Whether some of it is computed there."""
        return "cpu" in (self.dense.type, self.experts.type)


def decide(
    opened: OpenedCheckpoint,
    config: EngineConfig,
    devices: Sequence[Device],
    *,
    in_place: frozenset[str] = frozenset(),
) -> Decision:
    """Weighs what the model needs against what the devices and the machine have.

    Args:
        in_place: types of matrices that may be used as they lie in the model's files.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`: it fits nowhere.
    """
    layers = layer_names(opened.model)
    sizes = sizes_of(opened, config, devices, layers, in_place=in_place)
    placement = decide_placement(sizes, budgets_of(config, devices), config)
    in_place = types_in_place(opened, placement.precision, in_place)
    used = tuple(devices) if placement.devices else ()
    return Decision(
        placement,
        used,
        layers.on(placement.of_layer),
        sites_in(opened, placement.precision, in_place=in_place),
        _dense_sizes(opened, placement.precision, used, in_place=in_place),
        _dense_parameters(opened),
        in_place,
    )


def budgets_of(config: EngineConfig, devices: Sequence[Device]) -> Budgets:
    """What memory there is at this moment."""
    held = tuple(
        DeviceBudget(device.name, device.memory.total, device.memory.free, device.is_unified) for device in devices
    )
    return Budgets(available_ram() + EARLY_READS.nbytes, config.ram_bytes, held)


def sizes_of(
    opened: OpenedCheckpoint,
    config: EngineConfig,
    devices: Sequence[Device],
    layers: LayerNames,
    *,
    in_place: frozenset[str] = frozenset(),
) -> Sizes:
    """What the model takes, counted tensor by tensor."""
    precisions = candidates(opened) if config.precision == AUTO else (config.precision,)
    of_layer, elsewhere = layers.sums(_tensor_sizes(opened.model))
    return Sizes(
        name=opened.name,
        weights=tuple(
            _weights(opened, precision, devices, layers, in_place=types_in_place(opened, precision, in_place))
            for precision in precisions
        ),
        layers=of_layer,
        elsewhere=elsewhere,
        kv_per_token=opened.profile.kv_elements_per_token * opened.dtype.itemsize,
        activations_per_token=activation_token_bytes(
            opened.profile.hidden, opened.profile.experts_per_token, opened.dtype.itemsize
        ),
        context_tokens=opened.context_tokens(config),
        experts_per_token=opened.profile.experts_per_token,
    )


def candidates(opened: OpenedCheckpoint) -> tuple[str, ...]:
    """The precisions that `auto` chooses from."""
    return precisions_of(opened.plan.entries, opened.weights) if opened.dtype == torch.bfloat16 else LADDER


def dense_on_cards(opened: OpenedCheckpoint, places: Sequence[torch.device], precision: str) -> str | None:
    """The precision of linear layers on these devices, if they are to be quantised there."""
    if not format_of(precision).is_tiled or not places or not all(is_held_quantised(place) for place in places):
        return None
    if precision == STORED and not StoredLinears(opened).formats:
        return None  # a file of plain numbers
    return careful(precision, opened.weights)


def _weights(
    opened: OpenedCheckpoint,
    precision: str,
    devices: Sequence[Device],
    layers: LayerNames,
    *,
    in_place: frozenset[str],
) -> Weights:
    sites = sites_in(opened, precision, in_place=in_place)
    in_ram = sum(_dense_sizes(opened, precision, (), in_place=in_place).values())
    dense, elsewhere = layers.sums(_dense_sizes(opened, precision, devices, in_place=in_place))
    layouts: dict[Any, int] = {}
    is_quantised = dense_on_cards(opened, [device.torch_device for device in devices], precision) is not None
    return Weights(
        precision,
        dense,
        elsewhere,
        in_ram,
        tuple(
            Experts(
                site.layout.nbytes,
                site.num_experts,
                layers.index_of(site.name),
                layouts.setdefault(site.layout, len(layouts)),
                can_be_disk_backed(site),
            )
            for site in sites
        ),
        working_bytes(opened.plan, sites),
        in_ram if is_quantised else 0,  # it is quantised in RAM, on its way to the cards
    )


def _dense_sizes(
    opened: OpenedCheckpoint,
    precision: str,
    devices: Sequence[Device],
    *,
    in_place: frozenset[str] = frozenset(),
) -> dict[str, int]:
    """Bytes of every tensor but experts, as these devices will hold them, or RAM if there are none."""
    experts = {target for site in opened.sites for target in site.targets}
    sizes = {name: nbytes for name, nbytes in _tensor_sizes(opened.model).items() if name not in experts}
    if in_place and not devices:
        for name, entry in matrices_in_place(opened, in_place).items():
            if name in sizes:  # a tied one is counted once
                sizes[name] = entry.nbytes
        return sizes
    on_cards = dense_on_cards(opened, [device.torch_device for device in devices], precision)
    if on_cards is None:
        return sizes
    if in_place:
        return MatricesOnCards(opened).sizes(opened.model, sizes, together=len(devices) == 1)
    stored = StoredLinears(opened).formats if on_cards == STORED else None
    return quantised_sizes(opened.model, on_cards, sizes, stored)


def _dense_parameters(opened: OpenedCheckpoint) -> int:
    experts = {target for site in opened.sites for target in site.targets}
    elsewhere = experts.union(getattr(opened.model, "all_tied_weights_keys", None) or ())
    return sum(p.numel() for name, p in opened.model.named_parameters() if name not in elsewhere)


def _tensor_sizes(model: Any) -> dict[str, int]:
    """Bytes of every tensor by name; tied weights are counted once, as they will be held."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    sizes = {name: p.nbytes for name, p in model.named_parameters() if name not in tied}
    return {**sizes, **{name: buffer.nbytes for name, buffer in model.named_buffers()}}
