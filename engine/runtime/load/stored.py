"""Checkpoints that are quantised already: which format keeps what each tensor holds, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.gguf.codes import KEPT_IN, format_for
from engine.checkpoint.gguf.types import BY_NAME
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, is_blocks
from engine.checkpoint.quantised.packings import ByRows
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.sites import ExpertsSite, pairing_of, quantised
from engine.formats import STORED, TiledFormat, WeightFormat, format_of
from engine.formats.int4 import INT4
from engine.formats.int8 import INT8
from engine.formats.tiles import TiledMatrix, TiledShape
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import repack
from engine.runtime.load.blocks import Stored, StoredCodes, format_of_codes, pieces_of, store_coded, stored_of
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.library_conversion import LoadingPlan
from engine.runtime.load.tensor_reader import TensorReader

_CODES: dict[str, TiledFormat] = {f"{each.code_bits}-bit": each for each in (INT4, INT8)}


def is_stored_quantised(plan: LoadingPlan) -> bool:
    """Whether most of what a checkpoint holds is in blocks, so that `auto` tries to keep them."""
    entries = [*plan.rest.values(), *_expert_entries(plan)]
    blocks = sum(entry.nbytes for entry in entries if _type_of(pieces_of(entry)[0]) is not None)
    return 2 * blocks > sum(entry.nbytes for entry in entries)


def sites_in(opened: OpenedCheckpoint, precision: str) -> list[ExpertsSite]:
    """The experts modules with records in this precision."""
    if precision == STORED:
        return [_as_stored(site, opened.plan) for site in opened.sites]
    return quantised(opened.sites, precision, opened.weights) if format_of(precision).is_tiled else opened.sites


def _as_stored(site: ExpertsSite, plan: LoadingPlan) -> ExpertsSite:
    if not hasattr(site.module, "has_gate") or {part.dtype for part in site.layout.parts} != {torch.bfloat16}:
        return site
    formats = {
        name: common_format(_type_of(piece) for entry in part.entries() for piece in pieces_of(entry))
        for name, part in plan.index.modules[site.name].items()
    }
    if not any(formats.values()):
        return site

    def of_part(name: str) -> WeightFormat:
        return formats.get(name) or INT8  # kernels take plain and quantised matrices of an expert together nowhere

    return replace(site, layout=QuantisedLayout.quantising(site.layout, of_part, pairing_of(site.module)))


def common_format(types: Iterable[str | None]) -> TiledFormat | None:
    """The format of a matrix made of tensors of these types: int8 if no other holds the codes of all of them.

    `None` stands for plain numbers; so does the result.
    """
    found = set(types)
    named = [name for name in found if name is not None]
    if not named or len(named) < len(found):
        return None
    formats = {(target_of(name), BY_NAME[name].table if name in BY_NAME else None) for name in named}
    return formats.pop()[0] if len(formats) == 1 else INT8


def target_of(name: str) -> TiledFormat | None:
    """The format for a type, of blocks or as `_type_of` calls codes that are kept."""
    return format_for(name) if name in BY_NAME else _CODES[name.partition(" ")[0]]


def _type_of(entry: TensorEntry | ExpertSource) -> str | None:
    entry = entry if isinstance(entry, TensorEntry) else entry.entry
    kept = format_of_codes(entry)
    if kept is not None:
        assert isinstance(entry, PackedEntry)
        assert isinstance(entry.packing, ByRows)
        return f"{kept.code_bits}-bit {entry.packing.words}"
    if isinstance(entry, PackedEntry):
        return _type_of(entry.sources[0]) if len(entry.sources) == 1 else None
    return entry.dtype if is_blocks(entry.dtype) else None


def _expert_entries(plan: LoadingPlan) -> Iterable[TensorEntry]:
    return (entry for parts in plan.index.modules.values() for part in parts.values() for entry in part.entries())


class StoredLinears:
    """The linear layers whose codes a checkpoint has, by the names of their modules."""

    def __init__(self, opened: OpenedCheckpoint) -> None:
        self._plan = opened.plan
        self._tied: dict[str, str] = {}
        model = opened.model
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        names = {id(module): name for name, module in model.named_modules()}
        if id(head) in names and id(embeddings) in names:
            self._tied = {names[id(head)]: names[id(embeddings)]}

    @property
    def formats(self) -> Mapping[str, TiledFormat]:
        """The format of each."""
        found = {}
        for name in [*(key.removesuffix(".weight") for key in self._plan.renamed), *self._tied]:
            stored = self._stored(name)
            target = self.format_of(stored) if stored is not None else None
            if target is not None:
                found[name] = target
        return found

    def _stored(self, name: str) -> Stored | None:
        entry = self._plan.renamed.get(f"{name}.weight")
        if entry is None and name in self._tied:
            entry = self._plan.renamed.get(f"{self._tied[name]}.weight")
        return None if entry is None else stored_of(entry)

    def matrix(self, name: str, kernels: NativeKernels | None) -> TiledMatrix:
        """Reads the weight of the module of this name, one of `formats`.

        Raises:
            EngineError: as `TensorReader.read`.
        """
        stored = self._stored(name)
        assert stored is not None
        target_format = self.format_of(stored)
        assert target_format is not None
        matrix = TiledMatrix.empty(TiledShape(stored.rows, stored.columns, target_format))
        with TensorReader(lambda _done, _total: None, lambda: False, 0) as reader:
            if isinstance(stored, StoredCodes):
                store_coded([stored], matrix, reader)
            else:
                repack([((stored.read(reader),), matrix)], kernels)
        return matrix

    @staticmethod
    def format_of(stored: Stored) -> TiledFormat | None:
        """The format that loses least of a matrix."""
        return format_of_codes(stored.source) if isinstance(stored, StoredCodes) else format_for(stored.kind.name)


def stored_note(plan: LoadingPlan) -> str:
    """A sentence for people: what became of which type."""
    entries = (*plan.rest.values(), *_expert_entries(plan))
    types = {_type_of(piece) for entry in entries for piece in pieces_of(entry)}
    phrases = []
    for name in sorted(name for name in types if name is not None):
        target = target_of(name)
        assert target is not None
        phrases.append(f"{name} {'is kept as' if name in KEPT_IN or name not in BY_NAME else 'became'} {target.words}")
    return f"The file's {', '.join(phrases)}." if phrases else ""
