"""Synthetic models with fewer layers or words than the model whose shape they have: they say so in every figure.

`bench decode` runs them beside one with half as many layers: what a layer takes is their difference, and the rate of
all layers together follows from it, for each contestant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.shapes import PUBLISHED, published_layers
from engine.bench.opened import resolve_model, without_file_type
from engine.bench.report import Report
from engine.checkpoint.synthetic import SHAPES, is_synthetic, options_of, parse

if TYPE_CHECKING:
    from engine.bench.decode import Found
    from engine.common.config import EngineConfig

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a synthetic model differs from the one whose shape it has.

    Attributes:
        layers, whole_layers: its own, and all that there are.
        vocabulary, whole_vocabulary: likewise.
        shorter: the same with half of its layers, or None if it has one alone, or layers of several kinds.
    """

    layers: int
    whole_layers: int
    vocabulary: int
    whole_vocabulary: int
    shorter: str | None

    @property
    def words(self) -> str:
        """For the name of a figure: what of it there is."""
        parts = []
        if self.layers != self.whole_layers:
            parts.append(f"{self.layers} of {self.whole_layers} layers")
        if self.vocabulary != self.whole_vocabulary:
            parts.append(f"{self.vocabulary:,} of {self.whole_vocabulary:,} words")
        return ", ".join(parts)


def cut_of(model: str) -> Cut | None:
    """What a bench's model lacks; None for a whole one."""
    if not is_synthetic(model):
        return None
    plain, kind = without_file_type(model)
    name, _, query = plain.partition("?")
    if (published := name.removeprefix("synthetic:")) not in SHAPES:
        chosen = options_of(plain, [*SHAPES, *PUBLISHED])[1]
        layers = published_layers(published)
        return Cut(chosen.get("layers", layers), layers, 0, 0, None) if chosen else None
    whole, shape = SHAPES[published], parse(plain)[1]
    if (shape.layers, shape.vocab) == (whole.layers, whole.vocab):
        return None
    options = [part for part in query.split("&") if part and not part.startswith("layers=")]
    options += [f"layers={shape.layers // 2}", *([f"gguf={kind}"] if kind else [])]
    shorter = f"{name}?{'&'.join(options)}" if shape.layers > 1 else None
    return Cut(shape.layers, whole.layers, shape.vocab, whole.vocab, shorter)


def shorter(config: EngineConfig, cut: Cut | None, say: Callable[[str], None]) -> list[EngineConfig]:
    """The same with half of its layers, if there is one to compare with."""
    if cut is None or cut.shorter is None:
        return []
    return [replace(config, model=str(resolve_model(cut.shorter, say)))]


def add_whole(name: str, cut: Cut, found: Found, report: Report) -> None:
    """What a layer takes, what the rest does, and the rate of all layers, from runs in pairs."""
    whole = f"{name} of all {cut.whole_layers} layers"
    if cut.shorter is None:
        what = "one layer alone does" if cut.layers == 1 else "layers of several kinds do"
        report.skip_peer(whole, f"{what} not say what a layer takes")
        return
    between = cut.layers - cut.layers // 2
    missing, same_words = cut.whole_layers - cut.layers, cut.vocabulary == cut.whole_vocabulary
    per_layer: dict[str, list[float]] = {}
    rates = {who: [each[0] for each in values] for who, values in found.items()}
    for who, values in found.items():
        if len(values[0]) < 2:
            continue
        seconds = [(1 / long - 1 / short) / between for long, short in values]
        if min(seconds) > 0:
            per_layer[who] = seconds
        else:  # whatever is made of this would flatter
            report.skip_peer(f"{who}, {whole}", "half of the layers took as long: too noisy")
    if OURS not in per_layer:
        return
    words = "" if same_words else f", but {cut.vocabulary:,} of {cut.whole_vocabulary:,} words"
    labels = (f"{name}: a layer", f"{name}: head and the rest{words}", f"{whole}{words}")
    figures = {
        who: (
            [1000 * each for each in values],
            [1000 * (1 / rate - cut.layers * each) for rate, each in zip(rates[who], values, strict=True)],
            [1 / (1 / rate + missing * each) for rate, each in zip(rates[who], values, strict=True)],
        )
        for who, values in per_layer.items()
    }
    for number, (label, unit) in enumerate(zip(labels, ("ms", "ms", "tokens/s"), strict=True)):
        ours = figures[OURS][number]
        if min(ours) <= 0:
            report.skip_peer(label, "all of a token went into layers: too noisy")
            continue
        report.add(label, ours, unit)
        for who, each in figures.items():
            if who != OURS and min(each[number]) > 0:
                higher = unit == "tokens/s"
                theirs = each[number]
                report.add(label, ours, unit, peer=who, peer_values=theirs, higher_is_better=higher)
