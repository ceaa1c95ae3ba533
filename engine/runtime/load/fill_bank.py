"""Fills the expert bank from the checkpoint, an expert at a time wherever the checkpoint's layout allows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from engine.checkpoint.expert_index import ExpertSource, PartSources
from engine.checkpoint.stored import format_of_codes, pieces_of, rows_of
from engine.common import footprint
from engine.common.errors import EngineError, ErrorCode
from engine.experts.bank import BankLayer, ExpertBank
from engine.experts.quantised_layout import QuantisedLayout, quantise_layer
from engine.experts.ranges import Part
from engine.experts.record import PartSpec, RecordLayout, allocate_records
from engine.experts.sites import ExpertsSite
from engine.formats.tiles import Pairing
from engine.kernels.native.library import NativeKernels
from engine.runtime.load.blocks import Stored, StoredCodes, stored_of
from engine.runtime.load.library_conversion import LoadingPlan, PartConverter
from engine.runtime.load.repacking import Job, Repacker
from engine.runtime.load.tensor_reader import TensorReader, torch_dtype

_BATCH = footprint.REPACKED_BYTES


def fill_bank(
    model: Any,
    sites: list[ExpertsSite],
    plan: LoadingPlan,
    reader: TensorReader,
    bank: ExpertBank,
    kernels: NativeKernels | None = None,
) -> None:
    """Allocates and fills the records of every experts module, layer by layer.

    Besides the bank it needs memory for the tensors of one expert, or of one layer where the library's conversion
    mixes experts, and for one layer's records before they are quantised if they are (natively, with `kernels`).

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if expert weights are missing or do not fit.
    """
    by_name = {site.name: replace(site, layout=site.layout.unquantised) for site in sites}
    filled: set[str] = set()
    layers = {site.name: bank.add_layer(site.name, site.num_experts, site.layout) for site in sites}
    room, repacked = _Room(), {site.name: site for site in sites if is_repacked(site, plan)}
    with Repacker(reader, kernels) as repacker:
        for name, parts in plan.index.modules.items():
            if name in repacked:
                filled |= _repack_layer(model, repacked[name], plan, reader, layers[name], repacker)
                continue
            quantises = name in layers and isinstance(layers[name].layout, QuantisedLayout)
            if quantises:
                room.add_layer(name, by_name[name].num_experts, by_name[name].layout)
            for part in parts.values():
                converter = PartConverter(model, by_name, plan.converters[part.target])
                filled |= _fill_part(part, converter, reader, room if quantises else bank, by_name)
            if quantises:
                quantise_layer(room.layers.pop(name), layers[name], kernels)
    wanted = {target for site in sites for target in site.targets}
    if wanted - filled:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The checkpoint lacks the experts' {min(wanted - filled)}: download or copy the model again.",
        )


def working_bytes(plan: LoadingPlan, sites: list[ExpertsSite]) -> int:
    """Most memory that `fill_bank` needs besides the bank."""
    quantised = [site for site in sites if isinstance(site.layout, QuantisedLayout)]
    converted = [site for site in quantised if not is_repacked(site, plan)]
    room = max((site.num_experts * site.layout.unquantised.nbytes for site in converted), default=0)
    blocks = 2 * min(_BATCH, plan.index.nbytes) if len(converted) < len(quantised) else 0
    return room + max(_for_conversion(plan), blocks)


def is_repacked(site: ExpertsSite, plan: LoadingPlan) -> bool:
    """Whether all tiled matrices of these experts can be made of blocks, without their numbers in between."""
    parts = plan.index.modules.get(site.name)
    if parts is None or not isinstance(site.layout, QuantisedLayout):
        return False
    return all(_blocks_of_part(site.layout, name, parts[name], plan, [0])[0] for name, _ in site.layout.formats)


def _blocks_of_part(
    layout: QuantisedLayout, name: str, part: PartSources, plan: LoadingPlan, experts: Iterable[int]
) -> list[list[Stored]]:
    """What one matrix of each of these experts is made of: its rows, or gate and then up rows; nothing if it takes
    more."""
    order = PartConverter(None, {}, plan.converters[part.target]).rows_in_order(part)
    if order is None or not (part.is_fused or part.is_per_expert):
        return [[] for _ in experts]
    return [_blocks_of_expert(layout, name, order, part.of_expert(expert)) for expert in experts]


def _blocks_of_expert(
    layout: QuantisedLayout, name: str, order: list[str], of_expert: list[ExpertSource]
) -> list[Stored]:
    spec = next(spec for spec in layout.plain.parts if spec.name == name)
    sources = {source.pattern: source for source in of_expert}
    packings = [rows_of(sources[pattern]) for pattern in order]
    if any(spec.transposed != (packing is not None and packing.transposed) for packing in packings):
        return []
    pieces = [piece for pattern in order for piece in pieces_of(sources[pattern])]
    found = [stored for piece in pieces if (stored := stored_of(piece)) is not None]
    target = layout.tiled_shape(name).format
    if any(isinstance(stored, StoredCodes) and format_of_codes(stored.source) is not target for stored in found):
        return []  # fitting them natively by way of their numbers is faster
    alternating = any(packing is not None and packing.alternating for packing in packings)
    pairing = Pairing.ALTERNATING if alternating else Pairing.HALVES
    pairs = len(pieces) == 2 and layout.tiled_shape(name).pairing is pairing
    whole = len(found) == len(pieces) and (len(pieces) == 1 or pairs)
    fits = sum(blocks.rows for blocks in found) == spec.shape[0]
    return found if whole and fits and all(blocks.columns == spec.shape[1] for blocks in found) else []


def _repack_layer(
    model: Any,
    site: ExpertsSite,
    plan: LoadingPlan,
    reader: TensorReader,
    layer: BankLayer,
    repacker: Repacker,
) -> set[str]:
    """Makes the records of one layer of its blocks; what is not tiled is converted as ever."""
    layout, parts, filled = site.layout, plan.index.modules[site.name], set[str]()
    assert isinstance(layout, QuantisedLayout)
    here = layer.device.type == "cpu"
    records = layer.records if here else allocate_records(site.num_experts, layout, torch.device("cpu"))
    for begin, end in layout.padding:
        records[:, begin:end].zero_()  # so that equal experts have equal bytes
    made = ExpertBank(torch.device("cpu"))
    made.layers[site.name] = target = BankLayer(site.name, layout, records)
    jobs: list[Job] = []
    for name, part in parts.items():
        if layout.is_tiled(name):
            blocks = _blocks_of_part(layout, name, part, plan, range(part.experts))
            jobs += [(each, layout.matrix(target.rows, name, expert)) for expert, each in enumerate(blocks)]
            filled.add(part.target)
        else:
            converter = PartConverter(model, {site.name: site}, plan.converters[part.target])
            filled |= _fill_part(part, converter, reader, made, {site.name: site})
    repacker.add(jobs)
    if not here:
        repacker.finish()
        layer.records.copy_(records)
    return filled


class _Room(ExpertBank):
    """Room for one layer at a time, the same memory for layers of the same size."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._records: torch.Tensor | None = None

    def add_layer(self, name: str, num_experts: int, layout: RecordLayout) -> BankLayer:
        if self._records is None or self._records.shape != (num_experts, layout.nbytes):
            self._records = None  # before the other is allocated
            self._records = allocate_records(num_experts, layout, self.device)
        layer = self.layers[name] = BankLayer(name, layout, self._records)
        return layer


def _for_conversion(plan: LoadingPlan) -> int:
    most = 0
    for parts in plan.index.modules.values():
        for part in parts.values():
            whole = not (part.is_fused or part.is_per_expert)
            nbytes = sum(max(entry.nbytes, 2 * entry.numel) for entry in part.entries())  # unpacked, if they are packed
            most = max(most, nbytes * 3 if whole else nbytes * 6 // max(part.experts, 1))
    return most


def _fill_part(
    part: PartSources,
    converter: PartConverter,
    reader: TensorReader,
    bank: ExpertBank,
    sites: dict[str, ExpertsSite],
) -> set[str]:
    if _read_as_stored(part, converter, reader, bank, sites):
        return {part.target}
    made: set[str] = set()
    if part.is_fused or part.is_per_expert:
        for expert in range(part.experts):
            tensors = {source.pattern: [reader.read(source)] for source in part.of_expert(expert)}
            for target, value in converter.convert(part.target, 1, tensors).items():
                _store(target, value, expert, bank, sites)
                made.add(target)
    else:
        whole = {pattern: [reader.read(entry) for entry in entries] for pattern, entries in part.by_pattern.items()}
        for target, value in converter.convert(part.target, part.experts, whole).items():
            _store(target, value, None, bank, sites)
            made.add(target)
    return made


def _read_as_stored(
    part: PartSources,
    converter: PartConverter,
    reader: TensorReader,
    bank: ExpertBank,
    sites: dict[str, ExpertsSite],
) -> bool:
    """Reads straight into the records, if that is all there is to it: the most common case, and by far the fastest."""
    name, _, part_name = part.target.rpartition(".")
    spec = next(spec for spec in sites[name].layout.parts if spec.name == part_name)
    every = _as_stored(part, spec, converter)
    if every is None or bank.device.type != "cpu":
        return False
    places: list[tuple[ExpertSource, torch.Tensor]] = []
    for expert, sources in enumerate(every):
        place = bank.layers[name].part(part_name, expert).view(-1)
        counts = [source.nbytes // spec.dtype.itemsize for source in sources]
        places += zip(sources, torch.split(place, counts), strict=True)
    reader.read_into(places)
    return True


def _as_stored(part: PartSources, spec: PartSpec, converter: PartConverter) -> list[list[ExpertSource]] | None:
    """For each expert the sources whose bytes, one behind the other, are its part; None if it takes more."""
    order, fused = converter.rows_in_order(part), part.is_fused
    if order is None or spec.transposed or not (fused or part.is_per_expert):
        return None
    shapes = [entry.shape[1:] if fused else entry.shape for entry in part.entries()]
    if any(shape[1:] != spec.shape[1:] for shape in shapes):
        return None
    if any(torch_dtype(entry) != spec.dtype for entry in part.entries()):
        return None
    every: list[list[ExpertSource]] = []
    for expert in range(part.experts):
        sources = {source.pattern: source for source in part.of_expert(expert)}
        every.append([sources[pattern] for pattern in order])
        if sum(source.nbytes for source in every[-1]) != spec.nbytes:
            return None
    return every


def ranges_as_stored(site: ExpertsSite, plan: LoadingPlan) -> list[Part] | None:
    """Where the records of an experts module lie in the checkpoint's own files; None if some have to be made."""
    found: list[Part] = []
    sources = plan.index.modules.get(site.name, {})
    for spec in site.layout.parts if site.layout is site.layout.unquantised else ():
        part = sources.get(spec.name)
        every = _as_stored(part, spec, PartConverter(None, {}, plan.converters[part.target])) if part else None
        if not every:
            return None
        at = spec.offset
        for pieces in zip(*every, strict=True):
            if len({piece.nbytes for piece in pieces}) > 1:
                return None
            places = [(piece.entry.file, piece.entry.offset + (piece.row or 0) * piece.nbytes) for piece in pieces]
            found.append(Part(at, pieces[0].nbytes, places))
            at += pieces[0].nbytes
    return found or None


def _store(
    target: str, value: torch.Tensor, expert: int | None, bank: ExpertBank, sites: dict[str, ExpertsSite]
) -> None:
    name, _, part_name = target.rpartition(".")
    site = sites.get(name)
    spec = next((spec for spec in site.layout.parts if spec.name == part_name), None) if site is not None else None
    if spec is None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED, f"The checkpoint's experts are stored in an unknown way (at {target})."
        )
    place = bank.layers[name].stacked[part_name]
    place = place if expert is None else place[expert : expert + 1]
    if spec.transposed:
        value = value.transpose(-1, -2)
    if value.shape != place.shape:
        raise _misshapen(target, spec, value)
    place.copy_(value)


def _misshapen(target: str, spec: PartSpec, value: torch.Tensor) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"The checkpoint does not fit its config.json: {target} has the shape {tuple(value.shape[1:])} for an expert "
        f"instead of {spec.shape}.",
    )
