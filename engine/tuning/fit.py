"""Whether a model would run here, and how fast, before it is downloaded: the planner's answer, a row per candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.checkpoint.catalogue import Catalogue, CatalogueEntry
from engine.checkpoint.hub import Candidate
from engine.checkpoint.model_shape import ModelShape
from engine.planner.plan_parts import Limits, TierBytes
from engine.tuning.machine_look import MachineLook


@dataclass(frozen=True, slots=True)
class DiskBytes:
    """What a model takes on the disk of the models folder.

    Attributes:
        free: before the download.
        download: of the files.
        bank: of the experts' records that are prepared from them, where loading writes these.
    """

    free: int
    download: int
    bank: int = 0


@dataclass(frozen=True, slots=True)
class FitSpeed:
    """How fast it would answer.

    Attributes:
        decode: tokens per second; low, high: its range.
        ttft: seconds to the first token of a chat.
        timing: `estimated`, or `measured here` if this model was timed on this machine.
    """

    decode: float
    low: float
    high: float
    ttft: float
    timing: str


@dataclass(frozen=True, slots=True)
class FitRow:
    """One candidate on this machine.

    Attributes:
        candidate, bytes, quality: what it is; `bytes` to download.
        card: bars of the graphics card's memory; None if it is not used.
        ram, disk: bars of the others; `ram` is None if the model does not fit.
        from_disk: bytes of experts that do not fit into memory, and are read again and again.
        speed: None if the model does not fit.
        verdict: `fast`, `works`, `batch-only` or `too-large`.
        why: what the verdict rests on, in a sentence.
        load_anyway: what happens if it is loaded all the same, in a sentence.
    """

    candidate: Candidate
    bytes: int
    quality: str
    card: TierBytes | None
    ram: TierBytes | None
    disk: DiskBytes
    from_disk: int
    speed: FitSpeed | None
    verdict: str
    why: str
    load_anyway: str


@dataclass(frozen=True, slots=True)
class FitCard:
    """All candidates of a repository on this machine.

    Attributes:
        rows: in the order given.
        recommended: index of the row to take; None if none can run.
        why: what speaks for it, in a sentence.
    """

    rows: tuple[FitRow, ...]
    recommended: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A model of the catalogue for this machine.

    Attributes:
        role: `fast`, `balanced` or `best`.
        entry: the model; reference: for `engine.checkpoint.hub.find_candidate`.
        bytes: to download.
        speed: predicted.
        verdict: as in `FitRow`.
        sentence: what it is good at, and what to expect of it here.
    """

    role: str
    entry: CatalogueEntry
    reference: str
    bytes: int
    speed: FitSpeed
    verdict: str
    sentence: str

    def seconds_to_first_answer(self, bytes_per_s: float) -> float:
        """From the click: the download at this speed, preparing the model, and its first token."""
        raise NotImplementedError


def fit_card(found: Sequence[tuple[Candidate, ModelShape | None]], look: MachineLook, limits: Limits) -> FitCard:
    """How each candidate would run on this machine; pure but for the results of tuning, which it reads.

    Args:
        found: candidates and what they are; None where `Candidate.problem` says that it cannot run.
        limits: the budgets, the wanted context and precision.
    """
    raise NotImplementedError


def recommend(catalogue: Catalogue, look: MachineLook, limits: Limits) -> tuple[Recommendation, ...]:
    """At most three models of the catalogue for this machine: the fastest, the best in balance, the best that fits.

    Needs no network.
    """
    raise NotImplementedError
