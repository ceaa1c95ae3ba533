"""What worker and window say to each other about tuning; part of `engine.protocol`.

A run goes through the stages of `STAGES`.  After each of the first three parts the window is told what came of it:
`TuningMeasured`, `TuningPlans`, then a `TuningTimed` for every contestant.  It may be asked to end after any of them
(`until`), so that a wizard can stop there, and go on with the next command: what was measured is not measured again.

While other programs keep the processor busy a run waits for a moment (`waiting`), and then goes on all the same; what
comes out of it is not kept unless that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.common.config import EngineConfig
from engine.common.model_info import ModelInfo
from engine.hardware.measured import Measurements
from engine.planner.planned import Plan
from engine.tuning.result import Contestant, Timed, TuningKind, TuningResult

Stage = Literal["probing", "waiting", "measuring", "planning", "loading", "timing", "restoring"]
STAGES: tuple[Stage, ...] = ("probing", "waiting", "measuring", "planning", "loading", "timing", "restoring")
Until = Literal["measured", "planned", "timed"]
Measured = Literal[
    "ram", "cpu_flops", "cpu_experts", "gpu_flops", "gpu_memory", "gpu_experts", "h2d", "d2h", "disk", "decode"
]
Unit = Literal["bytes/s", "flop/s", "tokens/s"]


# --- command --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTuning:
    """Tune this machine for a model.  Ends in `TuningFinished` (also when cancelled) or `Failed`.

    Attributes:
        config: the model, and the settings as they are at present: what is `auto` or None there is to be found.
        kind: how thoroughly is measured, and how long timed.
        until: the last thing to be done.
        measure_again: also what was measured before on this very machine, at least as thoroughly.
        even_if_busy: keep what comes out also if other programs were busy meanwhile; else nothing of it is kept.
    """

    request_id: str
    config: EngineConfig
    kind: TuningKind = "quick"
    until: Until = "timed"
    measure_again: bool = False
    even_if_busy: bool = False


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TuningNumber:
    """A number that has just been found.

    Attributes:
        what: where it belongs in a picture of the machine; `decode` is that of the contestant being timed.
        detail: of what precisely, for people: `8 threads`, `int8, 16 tokens`.
    """

    what: Measured
    detail: str
    value: float
    unit: Unit


@dataclass(frozen=True, slots=True)
class TuningProgress:
    """How far a stage is.

    Attributes:
        name: what is being done: of a measurement, or of the contestant that is loaded or timed.
        done: 0 to 1 of the stage.
        number: what was just found, if something was.
    """

    request_id: str
    stage: Stage
    name: str
    done: float
    number: TuningNumber | None = None


@dataclass(frozen=True, slots=True)
class TuningMeasured:
    """The measurements are there: `engine.hardware.measurement_files.load_measurements(probe(), device)` has them,
    unless other programs were busy meanwhile.

    Attributes:
        kind: how thorough they are.
        taken_at: ISO 8601, UTC; `kept`: they are earlier ones, still true.
        notes: sentences for people.
        skipped: what could not be measured and why, as sentences.
        others: share of the processor that other programs took meanwhile.
    """

    request_id: str
    device: str
    kind: TuningKind
    taken_at: str
    kept: bool
    notes: tuple[str, ...]
    skipped: tuple[str, ...]
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class TuningPlans:
    """What will be timed, in that order; `plan` is the planner's first choice, for roofline and memory."""

    request_id: str
    plan: Plan
    contestants: tuple[Contestant, ...]


@dataclass(frozen=True, slots=True)
class TuningTimed:
    """A contestant has been timed, or could not be; comes again when repeats have changed its median."""

    request_id: str
    timed: Timed


@dataclass(frozen=True, slots=True)
class TuningFinished:
    """Terminal event of `StartTuning`.

    Attributes:
        finished: whether all that was asked for was done; else it was cancelled or failed, and no result is kept.
        result: None if it did not finish, or was to end before anything was timed.
        reloaded: whether models were freed or loaded; else what was loaded before is, untouched.
        loaded: if `reloaded`, the model that is loaded now: the one that was before, tuned if it is that which was
            tuned; None if there was none, or it could not be had again, which the note says.
        note: what else the user should know; may be empty.
        problem: why it failed half-way, as a sentence; empty if it did not.
        saved: whether the result is kept, and with it the measurements; not if other programs were busy, unless that
            was asked for.
        others: the largest share of the processor that other programs took.
        unsaved: measurements of this run that are not kept.
    """

    request_id: str
    finished: bool
    result: TuningResult | None
    reloaded: bool
    loaded: ModelInfo | None
    note: str = ""
    problem: str = ""
    saved: bool = True
    others: float = 0.0
    unsaved: Measurements | None = None
