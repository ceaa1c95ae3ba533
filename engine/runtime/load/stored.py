"""Checkpoints that are quantised already: which format keeps what each tensor holds, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from engine.checkpoint.gguf.codes import KEPT_IN
from engine.checkpoint.gguf.types import BY_NAME
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.stored import beside, common_format, linear_format, pieces_of, target_of, type_of
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.record_memory import HugePages
from engine.experts.sites import ExpertsSite, pairing_of, quantised
from engine.formats import BF16, STORED, TiledFormat, WeightFormat, format_of
from engine.formats.tiles import TiledMatrix, TiledShape
from engine.kernels.native.library import NativeKernels
from engine.runtime.load.blocks import Stored, stored_of
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.in_place import site_in_place
from engine.runtime.load.library_conversion import LoadingPlan
from engine.runtime.load.repacking import Repacker
from engine.runtime.load.tensor_reader import TensorReader


def sites_in(opened: OpenedCheckpoint, precision: str, *, in_place: frozenset[str] = frozenset()) -> list[ExpertsSite]:
    """The experts modules with records in this precision, or as the model's files have them if in these types."""
    if in_place:
        return [site_in_place(site, opened.plan, in_place) for site in opened.sites]
    if precision == STORED:
        return [_as_stored(site, opened.plan) for site in opened.sites]
    return quantised(opened.sites, precision, opened.weights) if format_of(precision).is_tiled else opened.sites


def _as_stored(site: ExpertsSite, plan: LoadingPlan) -> ExpertsSite:
    if not hasattr(site.module, "has_gate") or {part.dtype for part in site.layout.parts} != {torch.bfloat16}:
        return site
    sources = plan.index.modules[site.name]
    matrices = [part.name for part in site.layout.parts if len(part.shape) == 2]
    formats = dict(zip(matrices, beside(common_format(sources[name].entries()) for name in matrices), strict=True))
    if not any(formats.values()):
        return site

    def of_part(name: str) -> WeightFormat:
        return formats[name] or BF16

    return replace(site, layout=QuantisedLayout.quantising(site.layout, of_part, pairing_of(site.module)))


class StoredLinears:
    """The linear layers whose codes a checkpoint has, by the names of their modules.

    Args:
        reader: of the checkpoint; only to ask for a `matrix`.
    """

    def __init__(self, opened: OpenedCheckpoint, reader: TensorReader | None = None) -> None:
        self._plan, self._reader, self._pages = opened.plan, reader, HugePages()
        self._tied: dict[str, str] = {}
        model = opened.model
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        names = {id(module): name for name, module in model.named_modules()}
        if id(head) in names and id(embeddings) in names:
            self._tied = {names[id(head)]: names[id(embeddings)]}
        self._shared = set[str]()
        for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            self._shared.update(pair)

    def read_apart(self, names: Iterable[str]) -> set[str]:
        """Of the layers with these names, the weights that nothing but their `matrix` is made of."""
        weights = {f"{name}.weight" for name in names}
        return {name for name in weights if name in self._plan.renamed and name not in self._shared}

    def read_twice(self, names: Iterable[str]) -> int:
        """Bytes that are read for weights and again for these layers."""
        entries = [self._entry(name) for name in names if f"{name}.weight" not in self.read_apart([name])]
        return sum(entry.nbytes for entry in entries if entry is not None)

    @property
    def formats(self) -> Mapping[str, TiledFormat]:
        """The format of each."""
        found = {}
        for name in [*(key.removesuffix(".weight") for key in self._plan.renamed), *self._tied]:
            entry = self._entry(name)
            target = linear_format(entry) if entry is not None else None
            if target is not None:
                found[name] = target
        return found

    def _entry(self, name: str) -> TensorEntry | None:
        entry = self._plan.renamed.get(f"{name}.weight")
        if entry is None and name in self._tied:
            entry = self._plan.renamed.get(f"{self._tied[name]}.weight")
        return entry

    def shape(self, name: str) -> TiledShape:
        """Of the weight of the module of this name, one of `formats`."""
        stored, target = self._stored(name)
        return TiledShape(stored.rows, stored.columns, target)

    def matrix(self, name: str, kernels: NativeKernels | None) -> TiledMatrix:
        """Reads the weight of the module of this name, one of `formats`.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
        """
        matrix = TiledMatrix.empty(self.shape(name), empty=self._pages.empty)
        self.read_into(name, matrix, kernels)
        return matrix

    def read_into(self, name: str, matrix: TiledMatrix, kernels: NativeKernels | None) -> None:
        """The same, into a matrix of its shape.

        Raises:
            As `matrix`.
        """
        assert self._reader is not None
        with Repacker(self._reader, kernels) as repacker:
            repacker.add([([self._stored(name)[0]], matrix)])

    def _stored(self, name: str) -> tuple[Stored, TiledFormat]:
        entry = self._entry(name)
        assert entry is not None
        stored, target = stored_of(entry), linear_format(entry)
        assert stored is not None
        assert target is not None
        return stored, target


def stored_note(plan: LoadingPlan) -> str:
    """A sentence for people: what became of which type."""
    types = {type_of(piece) for entry in plan.entries for piece in pieces_of(entry)}
    phrases = []
    for name in sorted(name for name in types if name is not None):
        target = target_of(name)
        assert target is not None
        phrases.append(f"{name} {'is kept as' if name in KEPT_IN or name not in BY_NAME else 'became'} {target.words}")
    return f"The file's {', '.join(phrases)}." if phrases else ""
