"""Checkpoints that are quantised already: which format keeps what each tensor holds, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from engine.checkpoint.gguf.codes import KEPT_IN
from engine.checkpoint.gguf.types import BY_NAME
from engine.checkpoint.stored import beside, common_format, linear_format, pieces_of, target_of, type_of
from engine.experts.quantised_layout import QuantisedLayout
from engine.experts.sites import ExpertsSite, pairing_of, quantised
from engine.formats import BF16, STORED, TiledFormat, WeightFormat, format_of
from engine.formats.tiles import TiledShape
from engine.runtime.load.blocks import Stored, stored_of
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.in_place import site_in_place
from engine.runtime.load.library_conversion import LoadingPlan
from engine.runtime.load.library_models import tied_to


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


def stored_linears(opened: OpenedCheckpoint) -> dict[str, tuple[Stored, TiledFormat]]:
    """What a checkpoint has of linear layers in codes, and the formats that keep these, by the modules' names."""
    found: dict[str, tuple[Stored, TiledFormat]] = {}
    for name, module in opened.model.named_modules():
        entry = opened.weight_of(name) if isinstance(module, torch.nn.Linear) else None
        target, stored = (linear_format(entry), stored_of(entry)) if entry is not None else (None, None)
        if target is not None and stored is not None:
            found[name] = stored, target
    return found


def shape_of(stored: Stored, target: TiledFormat) -> TiledShape:
    """Of the matrix that keeps it."""
    return TiledShape(stored.rows, stored.columns, target)


def read_apart(opened: OpenedCheckpoint, linears: Iterable[str]) -> set[str]:
    """Parameters of the checkpoint that nothing but these linear layers is made of."""
    tied, plan = tied_to(opened.model), opened.plan
    weights = {f"{name}.weight" for name in linears} if plan.quantizer is None else set()
    return (weights & plan.renamed.keys()) - {*tied, *tied.values()}


def stored_note(plan: LoadingPlan) -> str:
    """A sentence for people: what became of which type."""
    types = {type_of(piece) for entry in plan.entries for piece in pieces_of(entry)}
    phrases = []
    for name in sorted(name for name in types if name is not None):
        target = target_of(name)
        assert target is not None
        phrases.append(f"{name} {'is kept as' if name in KEPT_IN or name not in BY_NAME else 'became'} {target.words}")
    return f"The file's {', '.join(phrases)}." if phrases else ""
