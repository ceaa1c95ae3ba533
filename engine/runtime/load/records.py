"""Experts' records, made of what a checkpoint stores.

A part of an expert is the rows of one stored tensor or of several.  Where these are a record's own bytes, they are
ranges of files; blocks and codes become tiles; everything else the library's converters make, an expert at a time
wherever the checkpoint's layout allows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.common import footprint
from engine.common.errors import EngineError, ErrorCode
from engine.experts.direct_file import Part, bytes_of
from engine.experts.dispatch import ExpertsSite
from engine.experts.record import RecordMemory, allocate_records
from engine.formats.tiles import Pairing, PartSpec, RecordLayout, TiledMatrix
from engine.kernels.interface import LayerRecords
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import quantise_record, repack
from engine.runtime.load.library_conversion import LoadingPlan, PartConverter, PartRows, PartSources
from engine.runtime.load.tensor_reader import DTYPES, Range, Stored, TensorReader, stored_of

_BATCH = footprint.REPACKED_BYTES

Job = tuple[Sequence[Stored], TiledMatrix]
"""The rows of a matrix, or its gate and then its up rows, and the matrix."""


def ranges_of(site: ExpertsSite, plan: LoadingPlan) -> list[Part] | None:
    """Where the records of an experts module lie; `None` if they are no ranges of the checkpoint's own files."""
    if site.layout is not site.layout.unquantised:
        return None
    sources, found = plan.experts.get(site.name, {}), list[Part]()
    for spec in site.layout.parts:
        parts = _ranges_of_part(spec, sources.get(spec.name))
        if parts is None:
            return None
        found += parts
    return found


def _ranges_of_part(spec: PartSpec, part: PartSources | None) -> list[Part] | None:
    """Those of a part whose bytes, one behind the other, are that of a record."""
    rows = part.rows if part is not None else None
    stacks = rows.stacks if rows is not None else None
    if rows is None or stacks is None or spec.transposed or rows.transposed or rows.alternating:
        return None
    if any(DTYPES.get(each.dtype) != spec.dtype or each.shape[1:] != spec.shape[1:] for each in stacks):
        return None
    begins = list(itertools.accumulate((stack.nbytes for stack in stacks), initial=spec.offset))
    if begins[-1] != spec.offset + spec.nbytes:
        return None
    return [Part(begin, stack.nbytes, stack.places) for begin, stack in zip(begins, stacks, strict=False)]


def read_parts(parts: Sequence[Part], records: torch.Tensor, reader: TensorReader) -> None:
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
    """

    def __init__(
        self, model: Any, plan: LoadingPlan, reader: TensorReader, kernels: NativeKernels | None = None
    ) -> None:
        self._model, self._plan, self._reader, self._kernels = model, plan, reader, kernels
        self._room = torch.empty(0, 0, dtype=torch.uint8)

    def fill(self, site: ExpertsSite, records: torch.Tensor) -> None:
        """Fills the records of an experts module, uint8 [E, nbytes], page-aligned, in RAM."""
        for begin, end in site.layout.padding:
            records[:, begin:end] = 0  # so that equal experts have equal bytes
        layout, tiled, jobs = site.layout, dict[str, PartRows](), list[Job]()
        if layout.tiled:
            found = _tiled_parts(site, self._plan)
            if found is None:
                self._quantise(site, layout, records)
                return
            rows, tiled = LayerRecords(site.name, layout, records).rows, found
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

    def _quantise(self, site: ExpertsSite, layout: RecordLayout, records: torch.Tensor) -> None:
        plain, shape = layout.unquantised, (site.num_experts, layout.unquantised.nbytes)
        if self._room.shape != shape:
            self._room = torch.empty(0, 0, dtype=torch.uint8)  # before the other is allocated
            self._room = allocate_records(site.num_experts, plain, torch.device("cpu"))
        self.fill(replace(site, layout=plain), self._room)
        for numbers, record in zip(self._room, records, strict=True):
            quantise_record(layout, numbers, record, self._kernels)

    def _fill_part(self, site: ExpertsSite, name: str, part: PartSources, records: torch.Tensor) -> set[str]:
        """Fills a part, and whatever else the library makes of its sources; returns the names of these parameters."""
        specs = {spec.name: spec for spec in site.layout.parts}
        ranges = _ranges_of_part(specs[name], part) if name in specs else None
        if ranges is not None:  # the most common case, and by far the fastest
            read_parts(ranges, records, self._reader)
            return {part.target}
        plain = replace(site, layout=site.layout.unquantised)
        converter = PartConverter(self._model, {site.name: plain}, part.converter)
        made, one_by_one = set[str](), part.is_apart
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
    quantised = [site for site in sites if site.layout.tiled]
    converted = [site for site in quantised if _tiled_parts(site, plan) is None]
    room = max((site.num_experts * site.layout.unquantised.nbytes for site in converted), default=0)
    blocks = 2 * min(_BATCH, plan.expert_bytes) if len(converted) < len(quantised) else 0
    return room + max(_for_conversion(plan), blocks)


def _for_conversion(plan: LoadingPlan) -> int:
    most = 0
    for parts in plan.experts.values():
        for part in parts.values():
            nbytes = sum(max(entry.nbytes, 2 * entry.numel) for entry in part.entries)  # unpacked, if they are packed
            most = max(most, nbytes * 6 // max(part.experts, 1) if part.is_apart else nbytes * 3)
    return most


def _tiled_parts(site: ExpertsSite, plan: LoadingPlan) -> dict[str, PartRows] | None:
    """All tiled matrices of these experts, if they can be made of blocks or codes without their numbers in between."""
    layout, found = site.layout, dict[str, PartRows]()
    for name, target in layout.tiled:
        spec = next(spec for spec in layout.unquantised.parts if spec.name == name)
        part = plan.experts.get(site.name, {}).get(name)
        rows = part.rows if part is not None else None
        if rows is None or rows.transposed != spec.transposed:
            return None
        stored = [stored_of(piece) for piece in rows.of_expert(0)]
        pairing = Pairing.ALTERNATING if rows.alternating else Pairing.HALVES
        is_paired = len(stored) == 2 and layout.tiled_shape(name).pairing is pairing
        if not (len(stored) == 1 or is_paired) or not _makes(stored, spec):
            return None
        # Codes of another format are fitted faster by way of their numbers.
        codes = [(each.packing, each) for each in stored if each is not None and each.packing is not None]
        if any(packing.kept_in(each.sources, each.columns) is not target for packing, each in codes):
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
    """Makes tiled matrices of what a checkpoint stores: some is read while what was read before is repacked."""

    def repack_read(read: list[tuple[list[tuple[Stored, list[torch.Tensor]]], TiledMatrix]]) -> None:
        repack([([stored.in_memory(raw) for stored, raw in made], matrix) for made, matrix in read], kernels)

    rooms, under_way = [torch.empty(0, dtype=torch.uint8)] * 2, Future[None]()
    under_way.set_result(None)
    with ThreadPoolExecutor(1, "repack") as pool:
        for batch, nbytes in _batches(
            sorted(jobs, key=lambda job: (job[0][0].sources[0].file, job[0][0].sources[0].offset))
        ):
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
            under_way = pool.submit(repack_read, matrices)
        under_way.result()


def _aligned(nbytes: int) -> int:
    return footprint.round_up(nbytes, 16)


def _batches(jobs: Sequence[Job]) -> Iterator[tuple[list[Job], int]]:
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
