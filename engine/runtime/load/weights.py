"""What is read: experts into the bank or onto disk, everything else through the library to where it is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.expert_index import ExpertIndex
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.library import remove_leftovers
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.memory_budget import MemoryCategory
from engine.experts.bank import ExpertBank
from engine.experts.cache.tier import ADAPTIVE
from engine.experts.disk_backed import DiskBackedBank, bind_disk_backed
from engine.experts.disk_tier import DiskTier
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.ram_pressure import RamPressure
from engine.experts.ram_tier import RamTier
from engine.experts.ranges import Part, RecordRanges, converted_part
from engine.experts.record import LayerSpec, RecordTable, allocate_records
from engine.experts.sites import ExpertsSite, bind, empty_modules
from engine.formats import STORED, TiledFormat
from engine.formats.tiles import TiledMatrix
from engine.kernels.dense import card_layers, quantise_on_cards
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import StoredMatrices, keep_linears, keepable
from engine.planner.placement import InRam
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.conversion import (
    WORTH_KEEPING,
    Conversion,
    Converted,
    convert,
    keep_converted,
    keeps_nothing,
    removed,
)
from engine.runtime.load.decision import Decision, dense_on_cards
from engine.runtime.load.files import Files
from engine.runtime.load.fill_bank import fill_bank, ranges_as_stored
from engine.runtime.load.in_place import (
    MatricesOnCards,
    bind_experts_in_place,
    bind_matrices_in_place,
    bytes_in_place,
    files_in_place,
    fill_records,
    matrices_in_place,
    parts_in_place,
)
from engine.runtime.load.library_conversion import load_rest
from engine.runtime.load.stored import StoredLinears
from engine.runtime.load.tensor_reader import TensorReader, torch_dtype
from engine.runtime.loaded_model import LoadingParts

OnProgress = Callable[[int, int], None]
_POLICY = ADAPTIVE
_MOSTLY = 0.9
"""Share of a checkpoint's bytes that must be used as they lie for its files to be held as a whole."""


def read_weights(
    opened: OpenedCheckpoint,
    decision: Decision,
    parts: LoadingParts,
    on_progress: OnProgress,
    cancelled: Callable[[], bool],
) -> str:
    """Fills the model and, with records, `parts`, whose files may still be on their way.

    Returns:
        A sentence for people about what was converted; may be empty.

    Raises:
        EngineError, RequestCancelled: as `engine.runtime.load.model.load_model`.
    """
    model, plan, placement = opened.model, opened.plan, decision.placement
    sites, devices, resident, on_disk = decision.sites, parts.devices, decision.resident, decision.on_disk
    if sites:
        from_host = decision.devices and not placement.all_experts
        host_memory = decision.devices[0].host_memory if from_host else None
        if host_memory is not None:
            host_memory.expect(sum(site.nbytes for site in resident))
        parts.bank = ExpertBank(decision.experts, host_memory, decision.experts_elsewhere)
    devices.count_weights(decision.dense_sizes)
    if decision.devices and placement.all_experts:
        for index in range(len(decision.devices)):
            mine = [site.nbytes for site in sites if decision.layers.of(site.name) == index]
            devices.count(index, sum(mine), MemoryCategory.EXPERTS)
    source = _Source(opened, decision, _conversion(opened, decision, parts))
    progress = _TwoParts(on_progress, source.nbytes + source.nbytes_of_whole)
    note = " ".join(filter(None, (source.open(parts, progress.first, cancelled), removed(remove_leftovers()))))
    parts.arriving += source.files.arriving
    with TensorReader(
        source.files.counting(progress.second),
        cancelled,
        source.nbytes,
        dtype=plan.dtype,
        kernels=parts.kernels,
    ) as reader:
        if parts.bank is not None:
            source.fill(parts, reader)
            empty_modules(model, sites)
            bind(resident, parts.bank, parts.kernels)
        if on_disk:
            parts.disk_backed = _slots_over(source.disk_tier(reader), placement.ram)
            bind_disk_backed(on_disk, parts.disk_backed, parts.kernels)
        parts.on_phase("reading")
        _read_rest(source, parts, reader)
    return note


def _conversion(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts) -> Conversion | None:
    """What has to be converted; None where there is little of that, which may as well be done in memory each time."""
    if decision.in_place:
        return None
    linears = parts.kernels is not None or _on_cards(opened, decision) is not None
    conversion = Conversion.of(opened, decision.precision, linears=linears, kernels=parts.kernels)
    on_disk = {site.name for site in decision.on_disk if ranges_as_stored(site, opened.plan) is None}
    conversion.sites = [
        site for site in conversion.sites if site.name in on_disk or isinstance(site.layout, QuantisedLayout)
    ]
    is_little = keeps_nothing() or conversion.nbytes < max(WORTH_KEEPING, 1)
    return None if is_little and not on_disk else conversion


def _on_cards(opened: OpenedCheckpoint, decision: Decision) -> str | None:
    """The precision of linear layers on cards, if they are quantised there."""
    return dense_on_cards(opened, _places(decision), decision.precision) if decision.devices else None


def _places(decision: Decision) -> list[torch.device]:
    return [device.torch_device for device in decision.devices] or [decision.dense]


class _Source:
    """Where everything is read from: a model's own files, as they are or to be converted in memory, and converted ones.

    Attributes:
        plan: what of the model's own files is converted in memory, or read by the library.
        files: whose bytes are used as they are.
        linears: those that are kept as they are stored or were converted; None if the library reads all.
    """

    def __init__(self, opened: OpenedCheckpoint, decision: Decision, conversion: Conversion | None) -> None:
        self.opened, self.decision, self.conversion = opened, decision, conversion
        self.converted: Converted | None = None
        self.uses_linears = not decision.devices or _on_cards(opened, decision) is not None
        self.in_whole_files = not decision.devices and not decision.on_disk
        self.files = Files(())
        names = {site.name for site in (opened.sites if decision.in_place else decision.on_disk)}
        if conversion is not None:
            names |= {site.name for site in conversion.sites}
        left = {name: each for name, each in opened.plan.index.modules.items() if name not in names}
        self.plan = replace(opened.plan, index=ExpertIndex(left))

    def open(self, parts: LoadingParts, on_progress: OnProgress, cancelled: Callable[[], bool]) -> str:
        """Converts what is not there yet, and lets files arrive in memory.

        Returns:
            A sentence for people; may be empty.

        Raises:
            EngineError, RequestCancelled: as `convert`.
        """
        opened, decision, conversion, note = self.opened, self.decision, self.conversion, ""
        if conversion is not None:
            parts.on_phase("converting" if conversion.is_needed else "reading")
            must = not {site.name for site in decision.on_disk}.isdisjoint(conversion.index_of)
            made = (convert if must else keep_converted)(conversion, on_progress, cancelled)
            if isinstance(made, str):
                note, self.conversion = made, None
                self.plan = _Source(opened, decision, None).plan
            else:
                note, self.converted = made.note, made
        container = self.converted.container if self.converted is not None else None
        if decision.in_place:
            whole = files_in_place(opened, decision.in_place)
        else:
            whole = [container.path] if container is not None else []
        self.files = Files([*whole, *self._of_numbers()] if self.in_whole_files else (), container)
        return note

    def _of_numbers(self) -> list[Path]:
        """The checkpoint's files, if nearly all that is in them is used as it lies there: they then are in memory as a
        whole, mapped where that is safe."""
        plan, decision = self.plan, self.decision
        if decision.in_place or not self.in_whole_files or plan.index.modules or plan.quantizer is not None:
            return []
        apart = {id(plan.renamed[name]) for name in self.apart_by_conversion}
        used = {id(entry): entry for entry in plan.renamed.values() if torch_dtype(entry) == plan.dtype}
        used = {key: entry for key, entry in used.items() if key not in apart}
        files = {file for entry in plan.rest.values() for file in entry.files}
        nbytes = sum(entry.nbytes for entry in used.values())
        stored = sum(file.stat().st_size for file in files)
        return sorted(files) if nbytes >= _MOSTLY * stored else []

    @property
    def apart_by_conversion(self) -> set[str]:
        """Parameters that nothing but converted linear layers is made of."""
        return self.conversion.apart if self.conversion is not None and self.uses_linears else set()

    def linears(self, kernels: NativeKernels | None, reader: TensorReader) -> StoredMatrices | None:
        """The linear layers that were converted, or that are made of what the checkpoint stores."""
        opened, decision, converted = self.opened, self.decision, self.converted
        if decision.in_place or not self.uses_linears:
            return None
        if converted is not None and converted.conversion.linears:
            return _ConvertedLinears(converted, self.files, reader)
        on_cpu = kernels is not None and not decision.devices
        is_stored = decision.precision == STORED and (on_cpu or bool(decision.devices))
        return StoredLinears(opened, reader) if is_stored else None

    def apart(self, linears: StoredMatrices | None) -> set[str]:
        """Parameters that are not read by the library."""
        opened = self.opened
        if self.decision.in_place and not self.decision.devices:
            return matrices_in_place(opened, self.decision.in_place).keys() & opened.plan.renamed.keys()
        if isinstance(linears, _ConvertedLinears):
            return linears.converted.conversion.apart
        if isinstance(linears, StoredLinears):
            of_cards = card_layers(opened.model, STORED, linears.formats) if self.decision.devices else None
            return linears.read_apart(of_cards or keepable(opened.model, linears.formats))
        return set()

    @property
    def nbytes(self) -> int:
        """What is read besides whole files."""
        own, decision, conversion = self.opened.plan, self.decision, self.conversion
        more, apart = 0, self.apart(None)
        if decision.in_place and decision.devices:
            more, apart = bytes_in_place(self.opened, decision.resident), set()
        elif conversion is not None:
            apart = self.apart_by_conversion
            if not self.in_whole_files:
                here = {site.name for site in conversion.sites}
                more = sum(site.nbytes for site in decision.resident if site.name in here)
                more += sum(layout.nbytes for layout in conversion.linears.values()) if self.uses_linears else 0
        mapped = sum(entry.nbytes for entry in self.plan.rest.values()) if self._of_numbers() else 0
        if decision.in_place and self.in_whole_files:
            apart |= {name for name, entry in own.renamed.items() if torch_dtype(entry) == own.dtype}
        return self.plan.nbytes + more - (mapped or sum(own.renamed[name].nbytes for name in apart))

    @property
    def nbytes_of_whole(self) -> int:
        """Of the files that arrive as a whole."""
        if not self.in_whole_files:
            return 0
        types = self.decision.in_place
        files = files_in_place(self.opened, types) if types else self._of_numbers()
        return sum(file.stat().st_size for file in files) + (
            self.conversion.contents.size if self.conversion is not None else 0
        )

    def fill(self, parts: LoadingParts, reader: TensorReader) -> None:
        """Gives the bank the experts that are held.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
        """
        opened, bank, resident = self.opened, parts.bank, self.decision.resident
        assert bank is not None
        if self.decision.in_place:
            if self.decision.devices:
                fill_records(opened, resident, reader, bank)
            else:
                bind_experts_in_place(opened, resident, self.files, reader, bank)
            return
        entries = self.converted.container.entries if self.converted is not None else {}
        others = [site for site in resident if site.name not in entries]
        is_converted = any(site.layout is not site.layout.unquantised for site in others)
        parts.on_phase("converting" if is_converted else "reading")
        fill_bank(opened.model, others, self.plan, reader, bank, parts.kernels)
        for site in resident:
            if site.name in entries:
                self._fill(site, entries[site.name], bank, reader)

    def _fill(self, site: ExpertsSite, entry: TensorEntry, bank: ExpertBank, reader: TensorReader) -> None:
        """Converted records: where they arrive, or read to where they are copied from."""
        if bank.takes_memory:
            records = self.files.bytes_of(entry, reader).view(site.num_experts, site.layout.nbytes)
            bank.adopt(site.name, site.layout, records)
            return
        layer = bank.add_layer(site.name, site.num_experts, site.layout)
        here = layer.device.type == "cpu"
        records = layer.records if here else allocate_records(site.num_experts, site.layout, torch.device("cpu"))
        self.files.read_into(entry, records.view(-1), reader)
        if not here:
            layer.records.copy_(records)

    def disk_tier(self, reader: TensorReader) -> DiskTier:
        """The experts that are read as they are needed.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
        """
        converted, on_disk = self.converted, self.decision.on_disk
        container = converted.container if converted is not None else None
        specs = [LayerSpec(site.name, site.num_experts, site.layout) for site in on_disk]
        parts: list[list[Part]] = []
        for site, spec in zip(on_disk, specs, strict=True):
            if container is not None and site.name in container.entries:
                parts.append(converted_part(container, spec))
            elif self.decision.in_place:
                parts.append(parts_in_place(self.opened, site, reader))
            else:
                own = ranges_as_stored(site, self.opened.plan)
                assert own is not None
                parts.append(own)
        ranges = RecordRanges(RecordTable(tuple(specs)), parts, container, direct=True)
        if converted is None:
            return DiskTier(ranges)
        conversion = converted.conversion
        return DiskTier(ranges, repair=lambda layer, expert: conversion.record(specs[layer].name, expert))


class _ConvertedLinears:
    """See `StoredMatrices`."""

    def __init__(self, converted: Converted, files: Files, reader: TensorReader) -> None:
        self.converted, self._files, self._reader = converted, files, reader

    @property
    def formats(self) -> Mapping[str, TiledFormat]:
        return self.converted.conversion.formats

    def matrix(self, name: str, kernels: NativeKernels | None) -> TiledMatrix:  # noqa: ARG002
        raw = self._files.bytes_of(self.converted.container.entries[name], self._reader)
        return self.converted.matrix(name, raw[None])


def _read_rest(source: _Source, parts: LoadingParts, reader: TensorReader) -> None:
    """Everything but the experts; where cards hold it quantised, it comes by way of RAM."""
    opened, decision, kernels = source.opened, source.decision, parts.kernels
    layers, model, places = decision.layers, opened.model, _places(decision)
    precision = _on_cards(opened, decision)
    if decision.in_place and precision is not None:
        on_cards = MatricesOnCards(opened, reader)
        load_rest(model, source.plan, reader, {"": torch.device("cpu")}, on_cards.names & opened.plan.renamed.keys())
        quantise_on_cards(model, precision, lambda name: places[layers.of(name)], None, on_cards)
        on_cards.bind_embeddings(model, lambda name: places[layers.of(f"{name}.")])
        _move_rest(model, decision, places)
        return
    linears = source.linears(kernels, reader)
    apart = source.apart(linears)
    if precision is None:
        load_rest(model, source.plan, reader, layers.device_map(places), apart, source.files.numbers)
        if decision.in_place and not decision.devices and kernels is not None:
            bind_matrices_in_place(opened, decision.in_place, source.files, kernels, reader)
        elif linears is not None and kernels is not None:
            keep_linears(model, linears, kernels)
        return
    load_rest(model, source.plan, reader, {"": torch.device("cpu")}, apart)
    quantise_on_cards(model, precision, lambda name: places[layers.of(name)], kernels, linears)
    _move_rest(model, decision, places)


def _move_rest(model: Any, decision: Decision, places: list[torch.device]) -> None:
    """What is still in RAM goes to its card."""
    for name, module in model.named_modules():
        place = places[decision.layers.of(f"{name}.")]
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None and tensor.device != place:
                    _move(own, key, place)


def _move(own: Any, key: str, place: torch.device) -> None:
    """A parameter stays the one that it is, for others may share it."""
    if isinstance(own[key], torch.nn.Parameter):
        own[key].data = own[key].data.to(place)
    else:
        own[key] = own[key].to(place)


class _TwoParts:
    """Progress of preparing and then of reading the rest, as one."""

    def __init__(self, on_progress: OnProgress, rest: int) -> None:
        self._on_progress = on_progress
        self._rest = rest
        self._prepared = 0

    def first(self, done: int, total: int) -> None:
        self._prepared = total
        self._on_progress(done, total + self._rest)

    def second(self, done: int, total: int) -> None:
        self._on_progress(self._prepared + done, self._prepared + total)


def _slots_over(disk: DiskTier, placed: InRam) -> DiskBackedBank:
    try:
        budget = min(placed.slots, disk.table.nbytes)
        pressure = RamPressure(budget)
        ram = RamTier(disk, budget, at_least=placed.at_least, policy=_POLICY, pressure=pressure)
        return DiskBackedBank(disk, ram)
    except BaseException:
        disk.close()
        raise


def disk_note(bank: DiskBackedBank) -> str:
    """One sentence for the user, with the figures."""
    total = bank.disk.table.nbytes
    note = (
        f"Experts are read from disk as they are needed, which is slower: there is RAM for {rounded_down(bank.nbytes)} "
        f"of their {rounded_up(total)}."
    )
    return " ".join([note, *bank.notes])
