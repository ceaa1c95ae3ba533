"""A fit card in words and bars: what a file is, how it would run here, and what that takes."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import QCoreApplication

from app.theme import ColourName
from app.widgets.memory_bar import BarPart, TierBar, memory_parts
from app.widgets.quantities import SEPARATOR, figures, file_size, memory, rough
from engine.checkpoint.hub import Candidate
from engine.planner.plan_parts import PicturePlan
from engine.tuning.fit import FitRow, FitSpeed

translate = QCoreApplication.translate

Presence = Literal["downloading", "here"]
"""Of a model that can be downloaded: it is on its way, or on this PC."""

FAST, WORKS, BATCH_ONLY, TOO_LARGE = "fast", "works", "batch-only", "too-large"
VERDICT_LOOKS: dict[str, tuple[int, ColourName]] = {
    FAST: (3, "pcie"),
    WORKS: (2, "gpu"),
    BATCH_ONLY: (1, "cpu"),
    TOO_LARGE: (0, "miss"),
}
"""Bars of a signal, and their colour: the number of bars and the word tell verdicts apart without the colour."""


def verdict_words(verdict: str) -> str:
    """`Fast`."""
    return {
        FAST: translate("Fit", "Fast"),
        WORKS: translate("Fit", "Works"),
        BATCH_ONLY: translate("Fit", "Batch only"),
        TOO_LARGE: translate("Fit", "Too large"),
    }[verdict]


def quality_words(quality: str) -> str:
    """How close a file's answers are to the original's."""
    return {
        "original": translate("Fit", "original"),
        "near": translate("Fit", "near-original"),
        "good": translate("Fit", "good quality"),
        "fair": translate("Fit", "fair quality"),
        "poor": translate("Fit", "poor quality"),
    }.get(quality, quality)


def speed_words(speed: FitSpeed | None) -> str:
    """`24.6 tokens/s` if that was measured, else `about 25 tokens/s`."""
    if speed is None:
        return "–"
    if speed.timing != "estimated":
        return translate("Fit", "{0} tokens/s").format(figures(speed.decode))
    return translate("Fit", "about {0} tokens/s").format(rough(speed.decode))


def range_words(speed: FitSpeed | None) -> str:
    """`estimated, 20 to 30`."""
    if speed is None:
        return ""
    if speed.timing != "estimated":
        return translate("Fit", "measured here")
    return translate("Fit", "estimated, {0} to {1}").format(rough(speed.low), rough(speed.high))


def first_token_words(speed: FitSpeed) -> str:
    """`first token after about 0.8 s`."""
    if speed.timing != "estimated":
        return translate("Fit", "first token after {0} s").format(figures(speed.ttft))
    return translate("Fit", "first token after about {0} s").format(rough(speed.ttft))


def picture_words(pictures: PicturePlan) -> str:
    """`pictures: 0.4 s each, 620 MB`."""
    words = translate("Fit", "pictures: about {0} s each on the graphics card, {1}")
    if not pictures.on_card:
        words = translate("Fit", "pictures: about {0} s each on the CPU, {1}")
    return words.format(rough(pictures.seconds), memory(pictures.nbytes))


def fit_bars(row: FitRow) -> tuple[TierBar, ...]:
    bars = []
    if row.card is not None:
        bars.append(TierBar(translate("Fit", "VRAM"), memory_parts(row.card), row.card.total))
    if row.ram is not None:
        bars.append(TierBar(translate("Fit", "RAM"), memory_parts(row.ram), row.ram.total))
    disk = row.disk
    files = BarPart(translate("Fit", "download"), disk.download, "disk")
    prepared = BarPart(translate("Fit", "converted weights"), disk.bank, "hit")
    if disk.bank_free is None or not disk.bank:
        bars.append(TierBar(translate("Fit", "Disk"), (files, prepared), disk.free, 10**9))
    else:
        bars.append(TierBar(translate("Fit", "Disk"), (files,), disk.free, 10**9))
        bars.append(TierBar(translate("Fit", "Library"), (prepared,), disk.bank_free, 10**9))
    return tuple(bars)


def spoken(row: FitRow, *, recommended: bool) -> str:
    said = [f"{row.candidate.label}, {file_size(row.bytes)}, {quality_words(row.quality)}"]
    if recommended:
        said[0] += SEPARATOR + translate("Fit", "recommended")
    said.append(verdict_words(row.verdict))
    if row.speed is not None:
        said.append(f"{speed_words(row.speed)} ({range_words(row.speed)}), {first_token_words(row.speed)}")
    said.append(row.candidate.problem or row.why)
    return "\n".join(filter(None, said))


def files_words(candidate: Candidate) -> str:
    """The name of what is downloaded: of several files the first one, and how many more."""
    weights = [file for file in candidate.files if file.path.lower().endswith((".gguf", ".safetensors"))]
    if not weights:
        return ""
    name = weights[0].path.rpartition("/")[2]
    if len(weights) == 1:
        return name
    return translate("Fit", "{0} and {1} more", "", len(weights) - 1).format(name, len(weights) - 1)
