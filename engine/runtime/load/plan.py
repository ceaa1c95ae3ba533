"""The plan of a load: what is read from where, in which form, and what holds it, before a weight is read.

`resolve` counts the sizes that a checkpoint's headers say and lets `engine.planner.placement` decide, which `fit`,
`plan` and Tune ask with sizes estimated from a model's shape.  `engine.runtime.load.model.build` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import precisions_of
from engine.common.config import EngineConfig
from engine.common.footprint import activation_token_bytes
from engine.devices.device import Device
from engine.devices.host_memory import available_ram
from engine.experts.dispatch import ExpertsSite
from engine.experts.file_image import EARLY_READS
from engine.formats import AUTO, LADDER
from engine.kernels.gpu.proof import reads_blocks
from engine.planner import placement as placing
from engine.planner.placement import Budgets, DeviceBudget, Experts, Made, Placement, Sizes, Tables, Weights
from engine.runtime.decoder_layers import LayerDevices, LayerNames, layer_names
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.conversion import Conversion, keeps_nothing
from engine.runtime.load.forms import ALL_TYPES, BLOCKS, Forms, formats_on_cards, lies_in_place, tensor_sizes
from engine.runtime.load.records import working_bytes
from engine.runtime.load.tables import StoredTable

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Machine:
    devices: Sequence[Device]
    memory: Budgets
    has_kernels: bool

    @classmethod
    def now(cls, config: EngineConfig, devices: Sequence[Device], *, has_kernels: bool) -> Machine:
        held = tuple(
            DeviceBudget(device.name, device.memory.total, device.memory.free, device.is_unified) for device in devices
        )
        memory = Budgets(available_ram() + EARLY_READS.nbytes, config.ram_bytes, held, keeps=not keeps_nothing())
        return cls(devices, memory, has_kernels)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How a model is going to be held.

    Attributes:
        devices: that it runs on; none if that is the CPU alone.
        forms: how each weight is held in that precision.
        tables: embeddings that stay on disk, by the names of their weights.
        streamed: where the weights of decoder layers lie that come from disk for each pass.
        conversion: what a file of converted weights holds, if there is to be one.
    """

    file: OpenedCheckpoint
    config: EngineConfig
    placement: Placement
    devices: tuple[Device, ...]
    layers: LayerDevices
    forms: Forms
    tables: dict[str, StoredTable]
    streamed: dict[int, list[TensorEntry]]
    conversion: Conversion | None

    @property
    def precision(self) -> str:
        return self.placement.precision

    @property
    def sites(self) -> list[ExpertsSite]:
        return self.forms.sites

    @property
    def dense_sizes(self) -> dict[str, int]:
        """Bytes of every tensor but experts and tables on disk, by name, as they will be held."""
        return {name: nbytes for name, nbytes in self.forms.sizes.items() if name not in self.tables}

    @property
    def context_tokens(self) -> int:
        return self.file.context_tokens(self.config.context_tokens)

    @property
    def dense(self) -> torch.device:
        """Where what is not split between devices is."""
        return self.devices[0].torch_device if self.devices else _CPU

    @property
    def places(self) -> list[torch.device]:
        return [device.torch_device for device in self.devices] or [_CPU]

    @property
    def experts(self) -> torch.device:
        return self.dense if self.placement.all_experts else _CPU

    @property
    def experts_elsewhere(self) -> dict[str, torch.device]:
        if not self.placement.all_experts:
            return {}
        found = {site.name: self.layers.of(site.name) for site in self.sites}
        return {name: self.devices[index].torch_device for name, index in found.items() if index}

    @property
    def on_disk(self) -> list[ExpertsSite]:
        return [site for site in self.sites if site.is_on_demand] if self.placement.on_disk else []

    @property
    def resident(self) -> list[ExpertsSite]:
        return [site for site in self.sites if not (self.placement.on_disk and site.is_on_demand)]

    @property
    def activations(self) -> list[int]:
        return [device.activations for device in self.placement.devices]

    @property
    def uses_cpu(self) -> bool:
        return "cpu" in (self.dense.type, self.experts.type)

    @property
    def in_whole_files(self) -> bool:
        return not self.devices and not self.on_disk and not self.tables and not self.streamed


def resolve(config: EngineConfig, machine: Machine, file: OpenedCheckpoint) -> Plan:
    """Weighs what the model needs against what the devices and the machine have.  Nothing is changed by it."""
    layers, types = layer_names(file.model), usable_types(machine, file)
    placement = placing.resolve(config, machine.memory, sizes_of(config, machine, file, types))
    devices = tuple(machine.devices) if placement.devices else ()
    forms = Forms(file, placement.precision, types, _places(devices), has_kernels=machine.has_kernels)
    return Plan(
        file=file,
        config=config,
        placement=placement,
        devices=devices,
        layers=layers.on(placement.of_layer),
        forms=forms,
        tables=forms.tables if placement.tables.on_disk else {},
        streamed=_streamed(forms, placement, layers),
        conversion=_conversion(machine, forms, placement, types),
    )


def usable_types(machine: Machine, file: OpenedCheckpoint) -> frozenset[str]:
    """Types of matrices that the CPU and all devices compute from as they lie in the model's files; none if they do not
    lie there as is needed."""
    types = BLOCKS if machine.devices else ALL_TYPES
    if not machine.has_kernels or file.dtype != torch.bfloat16 or not lies_in_place(file, types):
        return frozenset()
    formats = formats_on_cards(file) if machine.devices else set()
    return types if all(reads_blocks(device.torch_device, formats) for device in machine.devices) else frozenset()


def sizes_of(config: EngineConfig, machine: Machine, file: OpenedCheckpoint, types: frozenset[str]) -> Sizes:
    """What the model takes, counted tensor by tensor; `types` may be used as they lie in its files."""
    layers, width = layer_names(file.model), file.dtype.itemsize
    precisions: tuple[str, ...] = (config.precision,)
    if config.precision == AUTO:
        precisions = precisions_of(file.plan.entries, file.weights) if file.dtype == torch.bfloat16 else LADDER
    of_layer, elsewhere = layers.sums(tensor_sizes(file.model))
    return Sizes(
        name=file.name,
        weights=tuple(_weights(machine, file, precision, types, layers) for precision in precisions),
        layers=of_layer,
        elsewhere=elsewhere,
        kv_per_token=file.profile.kv.numbers * width,
        fixed_kv=file.profile.kv.fixed_bytes(width),
        activations_per_token=activation_token_bytes(file.profile.hidden, file.profile.experts_per_token, width),
        context_tokens=file.context_tokens(config.context_tokens),
        experts_per_token=file.profile.experts_per_token,
        tower=width * file.tower_weights,
    )


def _places(devices: Sequence[Device]) -> list[torch.device]:
    return [device.torch_device for device in devices]


def _conversion(machine: Machine, forms: Forms, placement: Placement, types: frozenset[str]) -> Conversion | None:
    if not placement.converted:
        return None
    kinds = (Made.ONCE, Made.FOR_DISK) if placement.on_disk else (Made.ONCE,)
    # For all devices: a model that does not fit them in the end finds what the CPU needs.
    every = Forms(forms.file, forms.precision, types, _places(machine.devices), has_kernels=machine.has_kernels)
    return Conversion(every, [site for site in forms.sites if site.is_on_demand and forms.made(site) in kinds])


def _weights(
    machine: Machine, file: OpenedCheckpoint, precision: str, types: frozenset[str], layers: LayerNames
) -> Weights:
    held, there = (
        Forms(file, precision, types, places, has_kernels=machine.has_kernels)
        for places in ((), _places(machine.devices))
    )
    layouts: dict[Any, int] = {}
    in_ram, tables = held.sizes, held.tables
    conversion = Conversion(there, [])
    return Weights(
        precision,
        *layers.sums(there.sizes),
        sum(in_ram.values()),
        tuple(
            Experts(
                site.layout.nbytes,
                site.num_experts,
                layers.index_of(site.name),
                layouts.setdefault(site.layout, len(layouts)),
                site.is_on_demand,
                held.made(site),
            )
            for site in held.sites
        ),
        working_bytes(file.plan, held.sites),
        there.passing_bytes(in_ram),
        conversion.nbytes,
        layers.sums({name: in_ram[name] for name in held.in_files() if name in in_ram})[0],
        Tables(
            *layers.sums({name: there.sizes[name] for name in tables}),
            in_ram=sum(in_ram[name] for name in tables),
            on_disk=sum(table.nbytes for table in tables.values()),
            kept=sum(table.kept for table in tables.values()),
            rows=sum(table.per_token for table in tables.values()),
            row_bytes=sum(table.per_token * table.row_bytes for table in tables.values()),
            in_transit=there.passing_bytes(in_ram) - there.passing_bytes(in_ram, tables),
        ),
    )


def _streamed(forms: Forms, placement: Placement, layers: LayerNames) -> dict[int, list[TensorEntry]]:
    found: dict[int, list[TensorEntry]] = {layer: [] for layer in placement.streamed.layers}
    for name, entries in forms.in_files().items() if found else ():
        layer = layers.index_of(name)
        if layer in found:
            found[layer] += entries
    return found
