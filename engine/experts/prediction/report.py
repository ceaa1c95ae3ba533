"""What prediction has done so far, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PredictorReport:
    """One predictor, measured on the recent routing whether it was in use or not.

    Attributes:
        name: as in the engine's configuration.
        layers: how often it was compared with what a layer wanted.
        hit_rate: of the experts that were wanted and not there, the share that was predicted.
        precision: of the experts that were predicted and not there, the share that was wanted.
        cost_s: of its own computation, seconds a step, as far as the step waits for it.
        gain_s: seconds a step that its use saves, after its cost, what it brings for nothing and whom that drives out.
    """

    name: str
    layers: int
    hit_rate: float
    precision: float
    cost_s: float
    gain_s: float


@dataclass(frozen=True, slots=True)
class PredictionReport:
    """The prefetcher.

    Attributes:
        adopted: who predicts now, None if nobody does.
        ahead: how many layers ahead.
        steps: decode steps seen.
        prefetched: experts whose bringing was begun; used: those that the layer then wanted; wasted: those it did not.
        predictors: all that could be asked.
        is_training: whether a learnt predictor is being trained now.
        note: what the user should know, as one sentence.
    """

    adopted: str | None
    ahead: int
    steps: int
    prefetched: int
    used: int
    wasted: int
    predictors: tuple[PredictorReport, ...]
    is_training: bool = False
    note: str | None = None
