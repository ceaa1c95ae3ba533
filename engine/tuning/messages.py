"""What worker and window say to each other about tuning; part of `engine.protocol`.

A run goes through the stages of `STAGES`. The first three parts each send their result: `TuningMeasured`,
`TuningPlans`, then a `TuningTimed` for every contestant. With `until` it ends after one of them, so that a wizard can
stop there and continue with the next command: measurements are not repeated.

While other programs keep the CPU busy, a run waits for a moment (`waiting`) and then goes on anyway; its results are
then not saved unless requested.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine.common.config import EngineConfig
from engine.common.json_fields import OfRequest
from engine.common.model_info import ModelInfo

if TYPE_CHECKING:
    from engine.hardware.measured import Measurements
    from engine.planner.plan_parts import Plan
    from engine.tuning.result import Contestant, Timed, TuningKind, TuningResult

_LATER = {
    "Measurements": "engine.hardware.measured",
    "Plan": "engine.planner.plan_parts",
    **dict.fromkeys(("Contestant", "Timed", "TuningKind", "TuningResult"), "engine.tuning.result"),
}
"""Modules of what only messages of a run have in them: every start of window and worker would wait for them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


Stage = Literal["probing", "waiting", "measuring", "planning", "loading", "timing", "restoring"]
STAGES: tuple[Stage, ...] = ("probing", "waiting", "measuring", "planning", "loading", "timing", "restoring")
Until = Literal["measured", "planned", "timed"]
Measured = Literal[
    "ram", "cpu_flops", "cpu_experts", "gpu_flops", "gpu_memory", "gpu_experts", "h2d", "d2h", "disk", "decode"
]
Unit = Literal["bytes/s", "flop/s", "tokens/s"]


# --- command --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTuning(OfRequest):
    """Tune this machine for a model.  Ends in `TuningFinished` (also when cancelled) or `Failed`.

    Attributes:
        config: the model and current settings: those that are `auto` or None are tuned.
        kind: thoroughness of measuring and timing.
        until: the last part to run.
        measure_again: ignore earlier measurements of this machine.
        even_if_busy: save results even if other programs were busy; otherwise nothing is saved.
    """

    config: EngineConfig
    kind: TuningKind = "quick"
    until: Until = "timed"
    measure_again: bool = False
    even_if_busy: bool = False


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TuningNumber:
    """A number just measured.

    Attributes:
        what: its place in the picture of the machine; `decode` belongs to the contestant being timed.
        detail: details for display: `8 threads`, `int8, 16 tokens`.
    """

    what: Measured
    detail: str
    value: float
    unit: Unit


@dataclass(frozen=True, slots=True)
class TuningProgress(OfRequest):
    """Progress of a stage.

    Attributes:
        name: name of the measurement, or of the contestant being loaded or timed.
        done: 0 to 1 of the stage.
        number: the latest number, if any.
    """

    stage: Stage
    name: str
    done: float
    number: TuningNumber | None = None


@dataclass(frozen=True, slots=True)
class TuningMeasured(OfRequest):
    """The machine is measured: `engine.hardware.measured.load_measurements(probe(), device)` returns the
    results, unless other programs were busy.

    Attributes:
        kind: thoroughness.
        taken_at: ISO 8601, UTC; `kept`: earlier measurements that are still valid.
        notes: sentences for the user.
        skipped: what could not be measured and why, as sentences.
        others: CPU share of other programs meanwhile.
    """

    device: str
    kind: TuningKind
    taken_at: str
    kept: bool
    notes: tuple[str, ...]
    skipped: tuple[str, ...]
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class TuningPlans(OfRequest):
    """The contestants in order of timing; `plan` is the planner's first choice, for roofline and memory."""

    plan: Plan
    contestants: tuple[Contestant, ...]


@dataclass(frozen=True, slots=True)
class TuningTimed(OfRequest):
    """A contestant was timed, or failed; sent again when repeats change its median."""

    timed: Timed


@dataclass(frozen=True, slots=True)
class TuningFinished(OfRequest):
    """Terminal event of `StartTuning`.

    Attributes:
        finished: whether the run completed; otherwise it was cancelled or failed, and no result is saved.
        result: None if it did not finish, or was limited by `until`.
        reloaded: whether models were unloaded or loaded; otherwise the earlier model is untouched.
        loaded: if `reloaded`, the model loaded now: the earlier one, with tuned settings if it is the tuned model; None
            if there was none, or if it could not be reloaded, which the note says.
        note: a further note for the user; may be empty.
        problem: why it failed, as a sentence; empty if it did not.
        saved: whether result and measurements are saved: not if other programs were busy, unless requested.
        others: the largest CPU share of other programs.
        unsaved: measurements of this run that were not saved.
    """

    finished: bool
    result: TuningResult | None = None
    reloaded: bool = False
    loaded: ModelInfo | None = None
    note: str = ""
    problem: str = ""
    saved: bool = True
    others: float = 0.0
    unsaved: Measurements | None = None
