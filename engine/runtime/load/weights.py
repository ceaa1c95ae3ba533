"""What is read: experts into the bank or onto disk, everything else through the library to where it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.library import remove_leftovers
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.memory_budget import MemoryCategory
from engine.experts.cache.tier import ADAPTIVE
from engine.experts.direct_file import Part
from engine.experts.disk_tier import DiskTier
from engine.experts.dispatch import BANK_LAYER, ExpertsSite, bind, empty_modules
from engine.experts.executor import ExpertExecutor
from engine.experts.ram_tier import RamPressure, RamTier
from engine.experts.record import ExpertBank, HugePages
from engine.experts.whole_layer import LayerStream
from engine.formats import STORED
from engine.formats.tiles import TiledMatrix, TiledShape
from engine.kernels import choose_kernel
from engine.kernels.gpu.linear import quantise_on_cards
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import hold_linears
from engine.planner.placement import InRam, Streamed
from engine.runtime.load.conversion import Conversion, Converted, convert, keep_converted, removed
from engine.runtime.load.forms import (
    bind_matrices_in_place,
    files_in_place,
    layer_in_place,
    parts_in_place,
)
from engine.runtime.load.library_conversion import load_rest
from engine.runtime.load.plan import Plan
from engine.runtime.load.records import RecordMaker, ranges_of, read_parts
from engine.runtime.load.tables import TableReads, bind_tables
from engine.runtime.load.tensor_reader import TensorReader, torch_dtype
from engine.runtime.loaded_model import LoadingParts

OnProgress = Callable[[int, int], None]
_POLICY = ADAPTIVE
_MOSTLY = 0.9
"""Share of a checkpoint's bytes that must be used as they lie for its files to be held as a whole."""


def read_weights(plan: Plan, parts: LoadingParts, on_progress: OnProgress, cancelled: Callable[[], bool]) -> str:
    """Fills the model and, with records, `parts`, whose files may still be on their way.

    Returns:
        A sentence for people about what was converted; may be empty.
    """
    _count_on_devices(plan, parts)
    progress, conversion = Progress(on_progress), plan.conversion
    is_made = conversion is not None and conversion.is_needed
    converting = progress.part(conversion.nbytes if conversion is not None and is_made else 0)
    whole = _whole_files(plan, conversion)
    reading, arriving = progress.part(_bytes_read(plan, conversion, whole)), progress.part(_arriving(plan, whole))
    converted: Converted | None = None
    note = ""
    if conversion is not None:
        conversion.kernels = parts.kernels
        parts.on_phase("converting" if is_made else "reading")
        work = convert if plan.placement.must_be_kept else keep_converted
        made = work(conversion, converting, cancelled)
        converted, note = (None, made) if isinstance(made, str) else (made, made.note)
        if converted is None:  # what was to be read of it is made of the model's own files
            whole = _whole_files(plan, None)
    note = " ".join(filter(None, (note, removed(remove_leftovers()))))
    container = converted.container if converted is not None else None
    if plan.streamed:
        parts.stream = LayerStream(plan.streamed, plan.placement.streamed.window)
    parts.on_arriving = arriving
    parts.reader = TensorReader(
        reading,
        cancelled,
        _bytes_read(plan, conversion if container is not None else None, whole),
        dtype=plan.file.plan.dtype,
        kernels=parts.kernels,
        whole=[*([container.path] if container is not None else []), *whole] if plan.in_whole_files else (),
        container=container,
        stream=parts.stream,
    )
    with parts.reader as reader:
        source = _Source(plan, converted, parts, reader)
        if plan.sites:
            source.fill_bank()
            empty_modules(plan.file.model, plan.sites)
            assert parts.bank is not None
            bind(plan.resident, parts.bank, parts.kernels)
        if plan.on_disk:
            parts.disk_backed = _slots_over(source.disk_tier(), plan.placement.ram)
            _bind_slots(plan.on_disk, parts.disk_backed, parts.kernels)
        parts.on_phase("reading")
        source.read_rest()
    return note


class Progress:
    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress, self._parts = on_progress, list[tuple[int, int]]()

    def part(self, total: int = 0) -> OnProgress:
        number = len(self._parts)
        self._parts.append((0, total))

        def count(done: int, total: int) -> None:
            before = self._parts[number]
            self._parts[number] = max(done, before[0]), max(total, before[1])
            self._on_progress(sum(done for done, _ in self._parts), sum(total for _, total in self._parts))

        return count


def _count_on_devices(plan: Plan, parts: LoadingParts) -> None:
    devices, all_experts = parts.devices, plan.placement.all_experts
    if plan.sites:
        host_memory = plan.devices[0].host_memory if plan.devices and not all_experts else None
        if host_memory is not None:
            host_memory.expect(sum(site.nbytes for site in plan.resident))
        parts.bank = ExpertBank(plan.experts, host_memory, plan.experts_elsewhere)
    devices.count_weights(plan.dense_sizes)
    for index in range(len(plan.devices) if all_experts else 0):
        mine = [site.nbytes for site in plan.sites if plan.layers.of(site.name) == index]
        devices.count(index, sum(mine), MemoryCategory.EXPERTS)


def _whole_files(plan: Plan, conversion: Conversion | None) -> list[Path]:
    """The checkpoint's files that are in memory as a whole, mapped where that is safe: those that are used in place, or
    whose tensors nearly all are used as they lie there."""
    own, in_place = plan.file.plan, plan.forms.in_place
    if not plan.in_whole_files or in_place:
        return files_in_place(plan.file, in_place) if plan.in_whole_files else []
    there = {site.name for site in conversion.sites} if conversion is not None else set()
    if own.quantizer is not None or any(site.name not in there for site in plan.sites):
        return []
    apart = {id(own.renamed[name]) for name in plan.forms.apart(converted=conversion is not None)}
    used = {id(entry): entry for entry in own.renamed.values() if torch_dtype(entry) == own.dtype}
    files = {file for entry in own.rest.values() for file in entry.files}
    nbytes = sum(entry.nbytes for key, entry in used.items() if key not in apart)
    return sorted(files) if nbytes >= _MOSTLY * sum(file.stat().st_size for file in files) else []


def _bytes_read(plan: Plan, conversion: Conversion | None, whole: list[Path]) -> int:
    own, there = plan.file.plan, {site.name for site in conversion.sites} if conversion is not None else set()
    apart = plan.tables.keys() | (plan.forms.apart(converted=True) if conversion is not None else set())
    others = {id(own.renamed[name]) for name in apart}
    used = [entry for entry in own.rest.values() if id(entry) not in others]
    nbytes = -plan.placement.streamed.nbytes
    for site in plan.resident:
        if site.name not in there:
            used += [entry for part in own.experts.get(site.name, {}).values() for entry in part.entries]
        elif not plan.in_whole_files:
            nbytes += site.nbytes
    return max(nbytes + sum(entry.nbytes for entry in used if entry.file not in whole), 0)


def _arriving(plan: Plan, whole: list[Path]) -> int:
    of_converted = plan.conversion.contents.size if plan.conversion is not None and plan.in_whole_files else 0
    return sum(file.stat().st_size for file in whole) + of_converted


class _Source:
    """A model's own files, as they are or made into something else, and converted ones."""

    def __init__(self, plan: Plan, converted: Converted | None, parts: LoadingParts, reader: TensorReader) -> None:
        self.plan, self.converted, self.parts, self.reader = plan, converted, parts, reader
        self.container = converted.container if converted is not None else None
        self.entries = self.container.entries if self.container is not None else {}

    def _ranges(self, site: ExpertsSite) -> list[Part] | None:
        if self.container is not None and site.name in self.entries:
            return self.container.parts(site.name)
        if self.plan.forms.in_place:
            return parts_in_place(self.plan.file, site, self.reader)
        return ranges_of(site, self.plan.file.plan)

    def fill_bank(self) -> None:
        plan, bank, resident = self.plan, self.parts.bank, self.plan.resident
        assert bank is not None
        if plan.forms.in_place and plan.in_whole_files:
            for site in resident:
                parts = parts_in_place(plan.file, site, self.reader)
                bank.layers[site.name] = layer_in_place(site, parts, self.reader)
            return
        makes = any(site.layout.tiled and site.name not in self.entries for site in resident)
        self.parts.on_phase("converting" if makes else "reading")
        maker = RecordMaker(plan.file.model, plan.file.plan, self.reader, self.parts.kernels)
        for site in resident:
            entry = self.entries.get(site.name)
            if entry is not None and bank.takes_memory:
                records = self.reader.bytes_of(entry).view(site.num_experts, site.layout.nbytes)
                bank.add_layer(site.name, site.num_experts, site.layout, records)
                continue
            with bank.filling(bank.add_layer(site.name, site.num_experts, site.layout)) as records:
                ranges = self._ranges(site)
                if entry is not None:
                    self.reader.read_bytes(entry, records.view(-1))
                elif ranges is not None:
                    read_parts(ranges, records, self.reader)
                else:
                    maker.fill(site, records)

    def disk_tier(self) -> DiskTier:
        sites, converted = self.plan.on_disk, self.converted
        found = [self._ranges(site) for site in sites]
        parts = [each for each in found if each is not None]
        assert len(parts) == len(found)

        def repair(layer: int, expert: int) -> torch.Tensor:
            assert converted is not None
            return converted.conversion.record(sites[layer].name, expert)

        return DiskTier(sites, parts, self.container, repair=repair if converted is not None else None)

    def read_rest(self) -> None:
        plan, file, forms, kernels = self.plan, self.plan.file, self.plan.forms, self.parts.kernels
        cpu, linears = torch.device("cpu"), forms.linears  # of the model as it is without weights
        places = {"": cpu} if forms.on_cards else plan.layers.device_map(plan.places)
        places |= {name.removesuffix(".weight"): cpu for name in plan.tables}
        apart = forms.apart(converted=self.converted is not None).union(plan.tables)
        load_rest(file.model, file.plan, self.reader, places, apart)
        if plan.tables:
            reads = self.parts.tables = TableReads()
            bind_tables(file, plan.tables, reads, kernels, self._place, in_place=forms.matrices)
        if forms.on_cards:
            if (blocks := forms.blocks) is not None:
                quantise_on_cards(
                    file.model, blocks.formats, lambda name: blocks.matrix(name, self.reader), self._place
                )
                blocks.bind_embeddings(file.model, lambda name: self._place(f"{name}."), self.reader, plan.tables)
            else:
                quantise_on_cards(file.model, linears, self._tiled(), self._place)
            self._move_rest()
        elif kernels is not None and forms.matrices:
            bind_matrices_in_place(file, forms.matrices, kernels, self.reader, besides=plan.tables)
        elif kernels is not None and linears:
            hold_linears(file.model, linears, self._tiled(), kernels)

    def _tiled(self) -> Callable[[str], TiledMatrix]:
        """Gives the weights of linear layers that were converted, or that are made of what the checkpoint stores, or of
        their numbers."""
        forms, linears, converted, pages = self.plan.forms, self.plan.forms.linears, self.converted, HugePages()

        def read(name: str) -> TiledMatrix:
            assert converted is not None
            return converted.conversion.matrix(name, self.reader.bytes_of(self.entries[name])[None])

        def made(name: str) -> TiledMatrix:
            weight = self.plan.file.model.get_submodule(name).weight
            rows, columns = weight.shape
            matrix = TiledMatrix.empty(TiledShape(rows, columns, linears[name]), empty=pages.empty)
            forms.fill(name, matrix, lambda: weight, self.reader, self.parts.kernels)
            return matrix

        if converted is None and forms.precision != STORED:
            self.parts.on_phase("converting")
        return made if converted is None else read

    def _place(self, name: str) -> torch.device:
        return self.plan.places[self.plan.layers.of(name)]

    def _move_rest(self) -> None:
        for name, module in self.plan.file.model.named_modules():
            place = self._place(f"{name}.")
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


def _bind_slots(sites: Sequence[ExpertsSite], ram: RamTier, kernels: NativeKernels | None) -> None:
    for layer, site in enumerate(sites):
        slots = ram.slots(layer)
        kernel = choose_kernel(site.module, slots, kernels)
        assert kernel is not None
        setattr(site.module, BANK_LAYER, (slots, ExpertExecutor(ram.source(layer, kernel), layer, ahead=ram)))


def _slots_over(disk: DiskTier, placed: InRam) -> RamTier:
    try:
        budget = min(placed.slots, disk.table.nbytes)
        return RamTier(disk, budget, at_least=placed.at_least, policy=_POLICY, pressure=RamPressure(budget))
    except BaseException:
        disk.close()
        raise


def tables_note(nbytes: int) -> str:
    return f"Embeddings of {rounded_up(nbytes)} stay on disk: the rows that a token needs are read there."


def layers_note(streamed: Streamed) -> str:
    return (
        f"{len(streamed.layers)} of the model's layers do not fit into RAM: their {rounded_up(streamed.nbytes)} are "
        "read from disk for each token, which is slow. Rows of a file share that: with many, each waits far less."
    )


def disk_note(ram: RamTier) -> str:
    note = (
        f"Experts are read from disk as they are needed, which is slower: there is RAM for {rounded_down(ram.nbytes)} "
        f"of their {rounded_up(ram.disk.table.nbytes)}."
    )
    return f"{note} {ram.note}".rstrip()
