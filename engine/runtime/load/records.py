"""Experts' records, made of what a checkpoint stores.

A part of an expert is the rows of one stored tensor or of several.  Where these are a record's own bytes, they are
ranges of files; blocks and codes become tiles; everything else the library's converters make, an expert at a time
wherever the checkpoint's layout allows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import format_of_codes, pieces_of, rows_of
from engine.common import footprint
from engine.common.errors import EngineError, ErrorCode
from engine.experts.bank import BankLayer
from engine.experts.direct_file import Part, Place, bytes_of
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.record import PartSpec, RecordLayout, RecordMemory, allocate_records
from engine.experts.sites import ExpertsSite
from engine.formats.tiles import Pairing, TiledMatrix
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import repack
from engine.runtime.load.library_conversion import LoadingPlan, PartConverter, PartSources, rows_in_order
from engine.runtime.load.tensor_reader import DTYPES, Range, Stored, StoredCodes, TensorReader, stored_of

_BATCH = footprint.REPACKED_BYTES

Job = tuple[Sequence[Stored], TiledMatrix]
"""The rows of a matrix, or its gate and then its up rows, and the matrix."""


@dataclass(frozen=True, slots=True)
class PartRows:
    """A part that is the rows of stored tensors, one below the other.

    Attributes:
        order: the patterns of its sources.
        transposed: whether they are stored the other way round than the library has them.
        alternating: whether the library has a row of each in turn.
    """

    part: PartSources
    order: Sequence[str]
    transposed: bool
    alternating: bool

    @classmethod
    def of(cls, part: PartSources | None, plan: LoadingPlan) -> PartRows | None:
        """`None` if the part takes more than rows."""
        order = rows_in_order(part, plan.converters[part.target]) if part is not None else None
        if part is None or order is None or not (part.is_fused or part.is_per_expert):
            return None
        packings = [rows_of(part.by_pattern[pattern][0]) for pattern in order]
        turned = {packing is not None and packing.transposed for packing in packings}
        alternating = any(packing is not None and packing.alternating for packing in packings)
        return cls(part, order, turned.pop(), alternating) if len(turned) == 1 else None

    def of_expert(self, expert: int) -> list[TensorEntry]:
        """The tensors of one expert."""
        sources = self.part.of_expert(expert)
        return [piece for pattern in self.order for piece in pieces_of(sources[pattern])]


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix or vector of every expert of a module, as files have it.

    Attributes:
        dtype, shape, nbytes: of one expert's.
        places: where that of each expert begins.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    places: Sequence[Place]

    @classmethod
    def of(cls, entries: Sequence[TensorEntry], experts: int, *, is_fused: bool) -> Stack | None:
        """That of a tensor [E, ...], or of one for each expert; `None` if they differ, or are made of others."""
        first, places = entries[0], list[Place]()
        for entry in entries:
            if type(entry) is not TensorEntry or (entry.dtype, entry.shape) != (first.dtype, first.shape):
                return None
            places.append((entry.file, entry.offset))
        if not is_fused:
            return cls(first.dtype, first.shape, first.nbytes, places)
        each = first.nbytes // experts
        places = [(first.file, first.offset + expert * each) for expert in range(experts)]
        return cls(first.dtype, first.shape[1:], each, places)


def stacks_of(rows: PartRows, plan: LoadingPlan) -> list[Stack] | None:
    """What the rows of a part are, one below the other; `None` if that is not the same for all experts."""
    part = rows.part
    if part.target not in plan.stacks:
        pieces = [zip(*map(pieces_of, part.by_pattern[pattern]), strict=True) for pattern in rows.order]
        found = [Stack.of(each, part.experts, is_fused=part.is_fused) for pattern in pieces for each in pattern]
        known = [stack for stack in found if stack is not None]
        plan.stacks[part.target] = known if len(known) == len(found) else None
    stacks: list[Stack] | None = plan.stacks[part.target]
    return stacks


def ranges_of(site: ExpertsSite, plan: LoadingPlan) -> list[Part] | None:
    """Where the records of an experts module lie; `None` if they are no ranges of the checkpoint's own files."""
    if site.layout is not site.layout.unquantised:
        return None
    sources, found = plan.experts.get(site.name, {}), list[Part]()
    for spec in site.layout.parts:
        parts = _ranges_of_part(spec, sources.get(spec.name), plan)
        if parts is None:
            return None
        found += parts
    return found


def _ranges_of_part(spec: PartSpec, part: PartSources | None, plan: LoadingPlan) -> list[Part] | None:
    """Those of a part whose bytes, one behind the other, are that of a record."""
    rows = PartRows.of(part, plan)
    stacks = stacks_of(rows, plan) if rows is not None else None
    if rows is None or stacks is None or spec.transposed or rows.transposed or rows.alternating:
        return None
    if any(DTYPES.get(each.dtype) != spec.dtype or each.shape[1:] != spec.shape[1:] for each in stacks):
        return None
    begins = list(itertools.accumulate((stack.nbytes for stack in stacks), initial=spec.offset))
    if begins[-1] != spec.offset + spec.nbytes:
        return None
    return [Part(begin, stack.nbytes, stack.places) for begin, stack in zip(begins, stacks, strict=False)]


def read_parts(parts: Sequence[Part], records: torch.Tensor, reader: TensorReader) -> None:
    """Reads parts of all records of a module, uint8 [E, nbytes], in RAM.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
    ranges = list[Range]()
    for part in parts:
        room = records[:, part.offset : part.offset + part.nbytes]
        if isinstance(part.places, memoryview):
            room.copy_(torch.frombuffer(part.places, dtype=torch.uint8).view(room.shape))
        else:
            ranges += [(*place, bytes_of(own)) for place, own in zip(part.places, room, strict=True)]
    reader.read_ranges(ranges)


class RecordMaker:
    """Makes records of a checkpoint's tensors.

    Besides the records it needs memory for the tensors of one expert, or of one layer where the library's conversion
    mixes experts, and for one layer's records before they are quantised if they are.

    Args:
        model: its skeleton.
        kernels: quantise, where there are any.
    """

    def __init__(
        self, model: Any, plan: LoadingPlan, reader: TensorReader, kernels: NativeKernels | None = None
    ) -> None:
        self._model, self._plan, self._reader, self._kernels = model, plan, reader, kernels
        self._room = torch.empty(0, 0, dtype=torch.uint8)

    def fill(self, site: ExpertsSite, records: torch.Tensor) -> None:
        """Fills the records of an experts module, uint8 [E, nbytes], page-aligned, in RAM.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED` if expert weights are missing or do not fit.
            RequestCancelled: the reader's `cancelled()` was true.
        """
        for begin, end in site.layout.padding:
            records[:, begin:end] = 0  # so that equal experts have equal bytes
        layout, tiled, jobs = site.layout, dict[str, PartRows](), list[Job]()
        if isinstance(layout, QuantisedLayout):
            found = _tiled_parts(site, self._plan)
            if found is None:
                self._quantise(site, layout, records)
                return
            rows, tiled = BankLayer(site.name, layout, records).rows, found
            for name, own in found.items():
                for expert in range(site.num_experts):
                    stored = [each for piece in own.of_expert(expert) if (each := stored_of(piece)) is not None]
                    jobs.append((stored, layout.matrix(rows, name, expert)))
        made = {f"{site.name}.{name}" for name in tiled}
        for name, part in self._plan.experts.get(site.name, {}).items():
            if name not in tiled:
                made |= self._fill_part(site, name, part, records)
        if missing := site.targets.keys() - made:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"The checkpoint lacks the experts' {min(missing)}: download or copy the model again.",
            )
        repack_all(jobs, self._reader, self._kernels)

    def _quantise(self, site: ExpertsSite, layout: QuantisedLayout, records: torch.Tensor) -> None:
        plain, shape = layout.unquantised, (site.num_experts, layout.unquantised.nbytes)
        if self._room.shape != shape:
            self._room = torch.empty(0, 0, dtype=torch.uint8)  # before the other is allocated
            self._room = allocate_records(site.num_experts, plain, torch.device("cpu"))
        self.fill(replace(site, layout=plain), self._room)
        for numbers, record in zip(self._room, records, strict=True):
            layout.quantise_record(numbers, record, self._kernels)

    def _fill_part(self, site: ExpertsSite, name: str, part: PartSources, records: torch.Tensor) -> set[str]:
        """Fills a part, and whatever else the library makes of its sources; returns the names of these parameters."""
        specs = {spec.name: spec for spec in site.layout.parts}
        ranges = _ranges_of_part(specs[name], part, self._plan) if name in specs else None
        if ranges is not None:  # the most common case, and by far the fastest
            read_parts(ranges, records, self._reader)
            return {part.target}
        plain = replace(site, layout=site.layout.unquantised)
        converter = PartConverter(self._model, {site.name: plain}, self._plan.converters[part.target])
        made, one_by_one = set[str](), part.is_fused or part.is_per_expert
        for expert in range(part.experts) if one_by_one else (None,):
            if expert is None:
                tensors = {key: [self._reader.read(entry) for entry in each] for key, each in part.by_pattern.items()}
            else:
                tensors = {key: [self._reader.read(entry)] for key, entry in part.of_expert(expert).items()}
            count = part.experts if expert is None else 1
            for target, value in converter.convert(part.target, count, tensors).items():
                module, _, own = target.rpartition(".")
                if module != site.name or own not in specs:
                    raise EngineError(
                        ErrorCode.MODEL_UNSUPPORTED,
                        f"The checkpoint's experts are stored in an unknown way (at {target}).",
                    )
                place = records if expert is None else records[expert : expert + 1]
                _store(target, value, specs[own], site.layout, place)
                made.add(target)
        return made


def _store(target: str, value: torch.Tensor, spec: PartSpec, layout: RecordLayout, records: torch.Tensor) -> None:
    place = layout.stacked_view(records, spec)
    if spec.transposed:
        value = value.transpose(-1, -2)
    if value.shape != place.shape:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The checkpoint does not fit its config.json: {target} has the shape {tuple(value.shape[1:])} for an "
            f"expert instead of {spec.shape}.",
        )
    place.copy_(value)


def working_bytes(plan: LoadingPlan, sites: Sequence[ExpertsSite]) -> int:
    """Most memory that a `RecordMaker` needs besides the records."""
    quantised = [site for site in sites if isinstance(site.layout, QuantisedLayout)]
    converted = [site for site in quantised if _tiled_parts(site, plan) is None]
    room = max((site.num_experts * site.layout.unquantised.nbytes for site in converted), default=0)
    blocks = 2 * min(_BATCH, plan.expert_bytes) if len(converted) < len(quantised) else 0
    return room + max(_for_conversion(plan), blocks)


def _for_conversion(plan: LoadingPlan) -> int:
    most = 0
    for parts in plan.experts.values():
        for part in parts.values():
            whole = not (part.is_fused or part.is_per_expert)
            nbytes = sum(max(entry.nbytes, 2 * entry.numel) for entry in part.entries())  # unpacked, if they are packed
            most = max(most, nbytes * 3 if whole else nbytes * 6 // max(part.experts, 1))
    return most


def _tiled_parts(site: ExpertsSite, plan: LoadingPlan) -> dict[str, PartRows] | None:
    """All tiled matrices of these experts, if they can be made of blocks or codes without their numbers in between."""
    layout, found = site.layout, dict[str, PartRows]()
    assert isinstance(layout, QuantisedLayout)
    for name, target in layout.formats:
        spec = next(spec for spec in layout.plain.parts if spec.name == name)
        rows = PartRows.of(plan.experts.get(site.name, {}).get(name), plan)
        if rows is None or rows.transposed != spec.transposed:
            return None
        stored = [stored_of(piece) for piece in rows.of_expert(0)]
        pairing = Pairing.ALTERNATING if rows.alternating else Pairing.HALVES
        is_paired = len(stored) == 2 and layout.tiled_shape(name).pairing is pairing
        if not (len(stored) == 1 or is_paired) or not _makes(stored, spec):
            return None
        # Codes of another format are fitted faster by way of their numbers.
        if any(isinstance(each, StoredCodes) and format_of_codes(each.source) is not target for each in stored):
            return None
        found[name] = rows
    return found


def _makes(stored: Sequence[Stored | None], spec: PartSpec) -> bool:
    known = [each for each in stored if each is not None]
    return (
        len(known) == len(stored)
        and sum(each.rows for each in known) == spec.shape[0]
        and all(each.columns == spec.shape[1] for each in known)
    )


def repack_all(jobs: Sequence[Job], reader: TensorReader, kernels: NativeKernels | None) -> None:
    """Makes tiled matrices of what a checkpoint stores: some is read while what was read before is repacked.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
    rooms, under_way = [torch.empty(0, dtype=torch.uint8)] * 2, Future[None]()
    under_way.set_result(None)
    with ThreadPoolExecutor(1, "repack") as pool:
        for batch, nbytes in _batches(sorted(jobs, key=lambda job: _place_of(job[0][0].sources[0]))):
            rooms.reverse()
            if len(rooms[0]) < nbytes:
                rooms[0] = RecordMemory(1, max(nbytes, _BATCH)).records[0]
            used, matrices = 0, []
            places: list[tuple[TensorEntry, torch.Tensor]] = []
            for sources, matrix in batch:
                made = []
                for stored in sources:
                    raw = []
                    for source in stored.sources:
                        raw.append(rooms[0][used : used + source.nbytes])
                        used += _aligned(source.nbytes)
                    places += zip(stored.sources, raw, strict=True)
                    made.append((stored, raw))
                matrices.append((made, matrix))
            reader.read_into(places)
            under_way.result()
            under_way = pool.submit(_repack, matrices, kernels)
        under_way.result()


def _place_of(entry: TensorEntry) -> Place:
    return entry.file, entry.offset


def _repack(
    matrices: list[tuple[list[tuple[Stored, list[torch.Tensor]]], TiledMatrix]], kernels: NativeKernels | None
) -> None:
    repack([([stored.in_memory(raw) for stored, raw in made], matrix) for made, matrix in matrices], kernels)


def _aligned(nbytes: int) -> int:
    """Numbers of any type may begin after so many bytes."""
    return footprint.round_up(nbytes, 16)


def _batches(jobs: Sequence[Job]) -> Iterator[tuple[list[Job], int]]:
    """Jobs that are read at once, and their bytes."""
    batch: list[Job] = []
    held = 0
    for job in jobs:
        nbytes = sum(_aligned(part.nbytes) for stored in job[0] for part in stored.sources)
        if batch and held + nbytes > _BATCH:
            yield batch, held
            batch, held = [], 0
        batch.append(job)
        held += nbytes
    if batch:
        yield batch, held
