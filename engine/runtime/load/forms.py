"""How a model's weights are held in one precision: as files have them, in tiles or in numbers; and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import beside, common_format, linear_format, pieces_of, target_of, type_of
from engine.common.footprint import PASSING_MATRICES
from engine.experts.dispatch import ExpertsSite
from engine.formats import BF16, STORED, TiledFormat, WeightFormat, as_stored, careful, format_of
from engine.formats.ggml import GGML
from engine.formats.layouts import RecordLayout
from engine.formats.tiles import Pairing, TiledMatrix
from engine.kernels.gpu.linear import is_held_quantised, quantised_sizes
from engine.kernels.interface import activation_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import formats_of_linears, large_linears
from engine.kernels.repack import quantise_into
from engine.planner.placement import Made
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.in_place import MatricesOnCards, matrices_in_place, site_in_place, types_in_place
from engine.runtime.load.library_conversion import LoadingPlan, parameter_dtypes
from engine.runtime.load.library_models import tied_to
from engine.runtime.load.records import ranges_of, repack_all
from engine.runtime.load.tables import StoredTable, tables_in
from engine.runtime.load.tensor_reader import Stored, TensorReader, stored_of, torch_dtype


class Forms:
    """How each weight is held.

    Args:
        precision: a name of `engine.formats`.
        types: of matrices, that may be used as they lie in the files.
        places: that hold everything but experts, if it is not RAM.
        has_kernels: whether native kernels compute what is on the CPU.

    Attributes:
        in_place: types of the experts, linear layers and embeddings that are used as they lie in the model's files, on
            an emulated device experts alone; none if that is not done.
        on_cards: whether linear layers are quantised on cards.
    """

    def __init__(
        self,
        file: OpenedCheckpoint,
        precision: str,
        types: frozenset[str] = frozenset(),
        places: Sequence[torch.device] = (),
        *,
        has_kernels: bool,
    ) -> None:
        self.file, self.precision, self.places, self._has_kernels = file, precision, tuple(places), has_kernels
        self.in_place = types_in_place(file, precision, types)
        self.on_cards = (
            format_of(precision).is_tiled
            and bool(places)
            and all(map(is_held_quantised, places))
            and (precision != STORED or bool(self.stored))  # else it is a file of plain numbers
        )

    @cached_property
    def sites(self) -> list[ExpertsSite]:
        if self.in_place:
            return [site_in_place(site, self.file.plan, self.in_place) for site in self.file.sites]
        return list(map(self._in_tiles, self.file.sites)) if format_of(self.precision).is_tiled else self.file.sites

    def _in_tiles(self, site: ExpertsSite) -> ExpertsSite:
        """A module with its own forward stays as it is."""
        if not hasattr(site.module, "has_gate") or {part.dtype for part in site.layout.parts} != {torch.bfloat16}:
            return site
        names = [part.name for part in site.layout.parts if len(part.shape) == 2]
        formats: dict[str, WeightFormat | None]
        if self.precision == STORED:
            sources = self.file.plan.experts[site.name]
            found = beside(common_format(sources[name].entries) for name in names)
            formats = dict(zip(names, found, strict=True))
        else:
            most, down = format_of(self.precision), format_of(careful(self.precision, self.file.weights))
            formats = {name: down if name == "down_proj" else most for name in names}
        if not any(formats.values()):
            return site
        pairing = Pairing.PLAIN
        if site.module.has_gate:  # its own gate function needs the rows in original order
            activation = activation_of(site.module)
            pairing = Pairing.HALVES if activation is None else activation.pairing
        return replace(site, layout=RecordLayout.in_tiles(site.layout, lambda name: formats[name] or BF16, pairing))

    def made(self, site: ExpertsSite) -> Made:
        if self.in_place:
            return Made.NEVER
        if site.layout.tiled:
            return Made.ONCE
        return Made.FOR_DISK if ranges_of(site, self.file.plan) is None else Made.NEVER

    @cached_property
    def stored(self) -> dict[str, tuple[Stored, TiledFormat]]:
        """What a checkpoint has of linear layers in codes, and the formats that keep these, by the modules' names."""
        found: dict[str, tuple[Stored, TiledFormat]] = {}
        for name, module in self.file.model.named_modules():
            entry = self.file.weight_of(name) if isinstance(module, torch.nn.Linear) else None
            target, stored = (linear_format(entry), stored_of(entry)) if entry is not None else (None, None)
            if target is not None and stored is not None:
                found[name] = stored, target
        return found

    @cached_property
    def tiled(self) -> dict[str, TiledFormat]:
        if self.in_place or not (self._has_kernels or self.on_cards) or not format_of(self.precision).is_tiled:
            return {}
        model, dtype_of = self.file.model, parameter_dtypes(self.file.model, self.file.dtype)
        if self.precision == STORED:
            return {name: self.stored[name][1] for name in large_linears(model, dtype_of) if name in self.stored}
        return formats_of_linears(model, careful(self.precision, self.file.weights), dtype_of)

    @property
    def linears(self) -> dict[str, TiledFormat]:
        on_cpu = self._has_kernels and all(place.type == "cpu" for place in self.places)
        return self.tiled if on_cpu or self.on_cards else {}

    def fill(
        self,
        name: str,
        target: TiledMatrix,
        weight: Callable[[], torch.Tensor],
        reader: TensorReader,
        kernels: NativeKernels | None,
    ) -> None:
        if self.precision == STORED:
            repack_all([([self.stored[name][0]], target)], reader, kernels)
        else:
            quantise_into(weight(), target, kernels)

    @cached_property
    def matrices(self) -> dict[str, TensorEntry]:
        return matrices_in_place(self.file, self.in_place) if self.in_place and not self.places else {}

    @cached_property
    def blocks(self) -> MatricesOnCards | None:
        return MatricesOnCards(self.file) if self.in_place and self.on_cards else None

    @cached_property
    def tables(self) -> dict[str, StoredTable]:
        return tables_in(self.file)

    def apart(self, *, converted: bool) -> set[str]:
        """Parameters of the checkpoint that the library does not load, tables aside: they are read as they lie there,
        or nothing is made of them but linear layers in tiles, of codes or `converted`."""
        renamed, tied = self.file.plan.renamed.keys(), tied_to(self.file.model)
        if self.blocks is not None:
            return self.blocks.names & renamed
        weights = {f"{name}.weight" for name in self.linears} if converted or self.precision == STORED else set()
        if self.file.plan.quantizer is not None:
            weights = set()
        return (self.matrices.keys() & renamed) | ((weights & renamed) - {*tied, *tied.values()})

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor but experts as they are held, in RAM while the model is loaded."""
        experts = {target for site in self.file.sites for target in site.targets}
        sizes = {name: nbytes for name, nbytes in tensor_sizes(self.file.model).items() if name not in experts}
        # A tied one counts once.
        sizes |= {name: entry.nbytes for name, entry in self.matrices.items() if name in sizes}
        if self.blocks is not None:
            return self.blocks.sizes(self.file.model, sizes, together=len(self.places) == 1)
        return quantised_sizes(self.file.model, self.linears, sizes) if self.on_cards else sizes

    def in_files(self) -> dict[str, tuple[TensorEntry, ...]]:
        """Where weights lie that the CPU uses as files have them, by name, tables that may stay on disk apart."""
        own, found = self.file.plan, dict[str, tuple[TensorEntry, ...]]()
        if own.quantizer is not None or not (self.in_place or as_stored(self.precision).name == self.precision):
            return found
        dtype_of = parameter_dtypes(self.file.model, own.dtype)
        dtypes = {name: dtype_of(name, parameter) for name, parameter in self.file.model.named_parameters()}
        for name, entry in own.renamed.items():
            if dtypes.get(name) == torch_dtype(entry) and entry.offset % dtypes[name].itemsize == 0 and entry.nbytes:
                found[name] = (entry,)
        found |= {name: entry.stored for name, entry in self.matrices.items()}
        return {name: entries for name, entries in found.items() if name not in self.tables}

    def passing_bytes(self, in_ram: dict[str, int], besides: Collection[str] = ()) -> int:
        """RAM for dense weights that are quantised on cards, on their way there, `besides` these; blocks pass through
        it a few at a time."""
        if not self.on_cards:
            return 0
        passing = self.blocks.names.difference(besides) if self.blocks is not None else set()
        largest = max((in_ram[name] for name in passing if name in in_ram), default=0)
        rest = sum(nbytes for name, nbytes in in_ram.items() if name not in passing and name not in besides)
        return rest + PASSING_MATRICES * largest


def tensor_sizes(model: Any) -> dict[str, int]:
    """Bytes of every tensor by name; tied weights are counted once, as they will be held."""
    tied = tied_to(model)
    sizes = {name: p.nbytes for name, p in model.named_parameters() if name not in tied}
    return {**sizes, **{name: buffer.nbytes for name, buffer in model.named_buffers()}}


def stored_note(plan: LoadingPlan) -> str:
    types = {type_of(piece) for entry in plan.entries for piece in pieces_of(entry)}
    phrases = []
    for name in sorted(name for name in types if name is not None):
        target = target_of(name)
        assert target is not None
        phrases.append(f"{name} {'is kept as' if name not in GGML or GGML[name].kept_in else 'became'} {target.words}")
    return f"The file's {', '.join(phrases)}." if phrases else ""
