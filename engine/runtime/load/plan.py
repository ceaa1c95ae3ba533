"""The plan of a load: what is read from where, in which form, and what holds it, before a weight is read.

`resolve` counts the sizes that a checkpoint's headers say and lets `engine.planner.placement` decide, which `fit`,
`plan` and Tune ask with sizes estimated from a model's shape.  `engine.runtime.load.model.build` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import precisions_of
from engine.common.config import CacheSettings, EngineConfig, Graphs, KvPrecision
from engine.common.footprint import PASSING_MATRICES, activation_token_bytes
from engine.devices.device import Device
from engine.devices.host_memory import available_ram
from engine.experts.disk_backed import can_be_disk_backed
from engine.experts.early_reads import EARLY_READS
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.sites import ExpertsSite
from engine.formats import AUTO, LADDER, STORED, as_stored, careful, format_of
from engine.kernels.dense import is_held_quantised, quantised_sizes
from engine.kernels.gpu.proof import reads_blocks
from engine.planner import placement as placing
from engine.planner.placement import Budgets, DeviceBudget, Experts, Made, Placement, Sizes, Tables, Weights
from engine.runtime.decoder_layers import LayerDevices, LayerNames, layer_names
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.conversion import Conversion, keeps_nothing, linears_in
from engine.runtime.load.in_place import (
    ALL_TYPES,
    BLOCKS,
    MatricesOnCards,
    formats_on_cards,
    lies_in_place,
    matrices_in_place,
    types_in_place,
)
from engine.runtime.load.library_conversion import parameter_dtypes
from engine.runtime.load.library_models import tied_to
from engine.runtime.load.records import lies_as_recorded, working_bytes
from engine.runtime.load.stored import shape_of, sites_in, stored_linears
from engine.runtime.load.tables import StoredTable, tables_in
from engine.runtime.load.tensor_reader import torch_dtype

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Machine:
    """What a model may run on.

    Attributes:
        devices: besides the CPU.
        memory: that there is at this moment.
        has_kernels: whether native kernels compute on the CPU here.
    """

    devices: Sequence[Device]
    memory: Budgets
    has_kernels: bool

    @classmethod
    def now(cls, config: EngineConfig, devices: Sequence[Device], *, has_kernels: bool) -> Machine:
        """As it is now."""
        held = tuple(
            DeviceBudget(device.name, device.memory.total, device.memory.free, device.is_unified) for device in devices
        )
        memory = Budgets(available_ram() + EARLY_READS.nbytes, config.ram_bytes, held, keeps=not keeps_nothing())
        return cls(devices, memory, has_kernels)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How a model is going to be held.

    Attributes:
        placement: what lies where, and in which precision.
        devices: that it runs on; none if that is the CPU alone.
        layers: what is on which of them.
        sites: its experts modules in that precision.
        dense_sizes: bytes of every tensor but experts, by name, as they will be held.
        dense_parameters: how many numbers they are.
        tables: embeddings that stay on disk, by the names of their weights.
        streamed: where the weights of decoder layers lie that come from disk for each pass.
        in_place: types of the experts, linear layers and embeddings that are used as they lie in the model's files, on
            an emulated device experts alone; none if that is not done.
        linears_on_cards: the precision of linear layers on cards, if they are quantised there.
        has_kernels: whether native kernels compute what is on the CPU.
        conversion: what a file of converted weights holds, if there is to be one.
        cache: how experts are kept on devices.
        context_tokens: the longest context that is asked for.
        ram_allowed: bytes, if there is a budget.
        graphs, kv_precision: see `EngineConfig`.
        speculates: whether coming tokens may be guessed; wants_head: with the checkpoint's own layer for that.
    """

    file: OpenedCheckpoint
    placement: Placement
    devices: tuple[Device, ...]
    layers: LayerDevices
    sites: list[ExpertsSite]
    dense_sizes: dict[str, int]
    dense_parameters: int
    tables: dict[str, StoredTable]
    streamed: dict[int, list[TensorEntry]]
    in_place: frozenset[str]
    linears_on_cards: str | None
    has_kernels: bool
    conversion: Conversion | None
    cache: CacheSettings
    context_tokens: int
    ram_allowed: int | None
    graphs: Graphs
    kv_precision: KvPrecision
    speculates: bool
    wants_head: bool

    @property
    def precision(self) -> str:
        """Of the weights."""
        return self.placement.precision

    @property
    def dense(self) -> torch.device:
        """Where what is not split between devices is."""
        return self.devices[0].torch_device if self.devices else _CPU

    @property
    def places(self) -> list[torch.device]:
        """All that anything but experts is on."""
        return [device.torch_device for device in self.devices] or [_CPU]

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

    @property
    def in_whole_files(self) -> bool:
        """Whether files are used in memory as a whole."""
        return not self.devices and not self.on_disk and not self.tables and not self.streamed


def resolve(config: EngineConfig, machine: Machine, file: OpenedCheckpoint) -> Plan:
    """Weighs what the model needs against what the devices and the machine have.  Nothing is changed by it.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`: it fits nowhere.
    """
    layers, devices = layer_names(file.model), machine.devices
    types = usable_types(machine, file)
    placement = placing.resolve(config, machine.memory, sizes_of(config, machine, file, types))
    precision = placement.precision
    in_place = types_in_place(file, precision, types)
    used = tuple(devices) if placement.devices else ()
    sites = sites_in(file, precision, in_place=in_place)
    tables = tables_in(file) if placement.tables.on_disk else {}
    dense_sizes = _dense_sizes(file, precision, used, in_place=in_place)
    return Plan(
        file=file,
        placement=placement,
        devices=used,
        layers=layers.on(placement.of_layer),
        sites=sites,
        dense_sizes={name: nbytes for name, nbytes in dense_sizes.items() if name not in tables},
        dense_parameters=_dense_parameters(file),
        tables=tables,
        streamed=_streamed(file, placement, layers, in_place=in_place),
        in_place=in_place,
        linears_on_cards=dense_on_cards(file, [device.torch_device for device in used], precision),
        has_kernels=machine.has_kernels,
        conversion=_conversion(machine, file, placement, sites, in_place=in_place),
        cache=config.cache,
        context_tokens=file.context_tokens(config.context_tokens),
        ram_allowed=config.ram_bytes,
        graphs=config.graphs,
        kv_precision=config.kv_precision,
        speculates=config.speculation != "off",
        wants_head=config.speculation == "heads",
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
    layers = layer_names(file.model)
    precisions = candidates(file) if config.precision == AUTO else (config.precision,)
    of_layer, elsewhere = layers.sums(_tensor_sizes(file.model))
    width = file.dtype.itemsize
    return Sizes(
        name=file.name,
        weights=tuple(
            _weights(machine, file, precision, layers, in_place=types_in_place(file, precision, types))
            for precision in precisions
        ),
        layers=of_layer,
        elsewhere=elsewhere,
        kv_per_token=file.profile.kv_elements_per_token * width,
        activations_per_token=activation_token_bytes(file.profile.hidden, file.profile.experts_per_token, width),
        context_tokens=file.context_tokens(config.context_tokens),
        experts_per_token=file.profile.experts_per_token,
        tower=width * file.tower_weights,
    )


def candidates(file: OpenedCheckpoint) -> tuple[str, ...]:
    """The precisions that `auto` chooses from."""
    return precisions_of(file.plan.entries, file.weights) if file.dtype == torch.bfloat16 else LADDER


def dense_on_cards(file: OpenedCheckpoint, places: Sequence[torch.device], precision: str) -> str | None:
    """The precision of linear layers on these devices, if they are to be quantised there."""
    if not format_of(precision).is_tiled or not places or not all(is_held_quantised(place) for place in places):
        return None
    if precision == STORED and not stored_linears(file):
        return None  # a file of plain numbers
    return careful(precision, file.weights)


def _conversion(
    machine: Machine,
    file: OpenedCheckpoint,
    placement: Placement,
    sites: Sequence[ExpertsSite],
    *,
    in_place: frozenset[str],
) -> Conversion | None:
    if not placement.converted:
        return None
    kinds = (Made.ONCE, Made.FOR_DISK) if placement.on_disk else (Made.ONCE,)
    chosen = [site for site in sites if can_be_disk_backed(site) and _made(file, site, in_place=in_place) in kinds]
    return Conversion(
        file, placement.precision, chosen, _linears(machine, file, placement.precision, in_place=in_place)
    )


def _made(file: OpenedCheckpoint, site: ExpertsSite, *, in_place: frozenset[str]) -> Made:
    if in_place:
        return Made.NEVER
    if isinstance(site.layout, QuantisedLayout):
        return Made.ONCE
    return Made.NEVER if lies_as_recorded(site, file.plan) else Made.FOR_DISK


def _linears(
    machine: Machine, file: OpenedCheckpoint, precision: str, *, in_place: frozenset[str]
) -> dict[str, QuantisedLayout]:
    """Layouts of the linear layers that are quantised, by name."""
    places = [device.torch_device for device in machine.devices]
    are_used = machine.has_kernels or dense_on_cards(file, places, precision) is not None
    return linears_in(file, precision) if are_used and not in_place else {}


def _weights(
    machine: Machine, file: OpenedCheckpoint, precision: str, layers: LayerNames, *, in_place: frozenset[str]
) -> Weights:
    devices = machine.devices
    sites = sites_in(file, precision, in_place=in_place)
    held, there = (_dense_sizes(file, precision, places, in_place=in_place) for places in ((), devices))
    in_ram, (dense, elsewhere) = sum(held.values()), layers.sums(there)
    layouts: dict[Any, int] = {}
    is_quantised = dense_on_cards(file, [device.torch_device for device in devices], precision) is not None
    tables, in_files = tables_in(file), _in_files(file, precision, in_place=in_place)
    linears = _linears(machine, file, precision, in_place=in_place)
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
                _made(file, site, in_place=in_place),
            )
            for site in sites
        ),
        working_bytes(file.plan, sites),
        _on_its_way(file, held, in_place=in_place) if is_quantised else 0,
        sum(layout.nbytes for layout in linears.values()),
        layers.sums({name: held[name] for name in in_files if name in held})[0],
        _tables(
            tables,
            layers,
            held,
            there,
            on_their_way=_on_its_way(file, held, in_place=in_place)
            - _on_its_way(file, held, in_place=in_place, besides=tables)
            if is_quantised
            else 0,
        ),
    )


def _on_its_way(
    file: OpenedCheckpoint, held: Mapping[str, int], *, in_place: frozenset[str], besides: Collection[str] = ()
) -> int:
    """RAM for dense weights that are quantised there, on their way to cards, `besides` these; blocks pass through it a
    few at a time."""
    passing = MatricesOnCards(file, besides=besides).names if in_place else set()
    largest = max((held[name] for name in passing if name in held), default=0)
    rest = sum(nbytes for name, nbytes in held.items() if name not in passing and name not in besides)
    return rest + PASSING_MATRICES * largest


def _in_files(
    file: OpenedCheckpoint, precision: str, *, in_place: frozenset[str]
) -> dict[str, tuple[TensorEntry, ...]]:
    """Where decoder layers' weights lie that the CPU uses as they do, by name, tables that may stay on disk apart."""
    own, found = file.plan, dict[str, tuple[TensorEntry, ...]]()
    if own.quantizer is not None or not (in_place or as_stored(precision).name == precision):
        return found
    dtype_of = parameter_dtypes(file.model, own.dtype)
    dtypes = {name: dtype_of(name, parameter) for name, parameter in file.model.named_parameters()}
    for name, entry in own.renamed.items():
        if dtypes.get(name) == torch_dtype(entry) and entry.offset % dtypes[name].itemsize == 0 and entry.nbytes:
            found[name] = (entry,)
    for name, entry in matrices_in_place(file, in_place).items() if in_place else ():
        found[name] = entry.stored
    tables = tables_in(file)
    return {name: entries for name, entries in found.items() if name not in tables}


def _streamed(
    file: OpenedCheckpoint, placement: Placement, layers: LayerNames, *, in_place: frozenset[str]
) -> dict[int, list[TensorEntry]]:
    found: dict[int, list[TensorEntry]] = {layer: [] for layer in placement.streamed.layers}
    for name, entries in _in_files(file, placement.precision, in_place=in_place).items() if found else ():
        layer = layers.index_of(name)
        if layer in found:
            found[layer] += entries
    return found


def _tables(
    found: Mapping[str, StoredTable],
    layers: LayerNames,
    in_ram: Mapping[str, int],
    on_devices: Mapping[str, int],
    *,
    on_their_way: int,
) -> Tables:
    """What they take, given the bytes of all tensors in RAM and on devices."""
    tables = found.values()
    return Tables(
        *layers.sums({name: on_devices[name] for name in found}),
        in_ram=sum(in_ram[name] for name in found),
        on_disk=sum(table.nbytes for table in tables),
        kept=sum(table.kept for table in tables),
        rows=sum(table.per_token for table in tables),
        row_bytes=sum(table.per_token * table.row_bytes for table in tables),
        on_their_way=on_their_way,
    )


def _dense_sizes(
    file: OpenedCheckpoint, precision: str, devices: Sequence[Device], *, in_place: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Bytes of every tensor but experts, as these devices will hold them, or RAM if there are none."""
    experts = {target for site in file.sites for target in site.targets}
    sizes = {name: nbytes for name, nbytes in _tensor_sizes(file.model).items() if name not in experts}
    if in_place and not devices:
        for name, entry in matrices_in_place(file, in_place).items():
            if name in sizes:  # a tied one is counted once
                sizes[name] = entry.nbytes
        return sizes
    on_cards = dense_on_cards(file, [device.torch_device for device in devices], precision)
    if on_cards is None:
        return sizes
    if in_place:
        return MatricesOnCards(file).sizes(file.model, sizes, together=len(devices) == 1)
    stored = {name: shape_of(*each).format for name, each in stored_linears(file).items()}
    return quantised_sizes(file.model, on_cards, sizes, stored if on_cards == STORED else None)


def _dense_parameters(file: OpenedCheckpoint) -> int:
    elsewhere = {target for site in file.sites for target in site.targets}.union(tied_to(file.model))
    return sum(p.numel() for name, p in file.model.named_parameters() if name not in elsewhere)


def _tensor_sizes(model: Any) -> dict[str, int]:
    """Bytes of every tensor by name; tied weights are counted once, as they will be held."""
    tied = tied_to(model)
    sizes = {name: p.nbytes for name, p in model.named_parameters() if name not in tied}
    return {**sizes, **{name: buffer.nbytes for name, buffer in model.named_buffers()}}
