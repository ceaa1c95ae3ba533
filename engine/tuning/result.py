"""What a tuning run found: the ways that were timed, who won, and how far predictions were off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.common.config import EngineConfig
from engine.hardware.other_programs import is_busy

TuningKind = Literal["quick", "thorough"]
TUNING_KINDS: tuple[TuningKind, ...] = ("quick", "thorough")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to run the model, before it has been timed.

    Attributes:
        name: of it alone in its run, for people: `int8, Switchyard mixed, 2 threads`.
        config: that the engine is given, to the letter.
        predicted_tokens_per_s, low, high: decoding, with what earlier timings corrected; 0 if it cannot be predicted.
        is_before: it is how the model runs at present; several may stand for one way: a plan can be what runs already.
        is_plan: it is the planner's first choice.
    """

    name: str
    config: EngineConfig
    predicted_tokens_per_s: float
    low: float
    high: float
    is_before: bool = False
    is_plan: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """A contestant after the race.

    Attributes:
        tokens_per_s: median of `rates`, decoding without the first token; 0 if none was reached.
        rates: of each repeat.
        ttft_s: median time until the first token of a short prompt.
        load_s: that loading took, the first time.
        device, precision, threads: as it was really loaded; empty and 0 if it was not.
        note: what the engine said on loading it, such as that it runs on the CPU after all.
        problem: why it could not be timed, as a sentence; empty if it was.
        others: share of the processor that other programs took meanwhile, 0 to 1.
    """

    contestant: Contestant
    tokens_per_s: float = 0.0
    rates: tuple[float, ...] = ()
    ttft_s: float = 0.0
    load_s: float = 0.0
    device: str = ""
    precision: str = ""
    threads: int = 0
    note: str = ""
    problem: str = ""
    others: float = 0.0


@dataclass(frozen=True, slots=True)
class Correction:
    """By what predictions are to be multiplied: what was timed over what the model of the machine said.

    Attributes:
        precision: of the experts.
        on_card: whether a card took part.
        threads: of the CPU.
    """

    precision: str
    on_card: bool
    threads: int
    factor: float


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a result depends on: `graphics card`, `none`."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class TuningResult:
    """A finished run.

    Attributes:
        model: name for people; `model_mark` tells its files from others (see `engine.tuning.keeping.model_mark`).
        asked: the settings that were tuned: what is `auto` or None there, the result may decide.
        taken_at: ISO 8601, UTC.
        machine: what it was tuned on (`engine.hardware.measurement_files.described`).
        timed: the fastest first; those that failed last.
        winner: name of the contestant that the model is run with from now on; empty if none could be run.
        corrections: see there.
        notes: sentences for people.
        others: the largest share of the processor that other programs took while something was measured or timed.
        outrun: tokens/s that the model was later seen to reach with it, where that is far above what was timed; else 0.
    """

    model: str
    model_mark: str
    asked: EngineConfig
    kind: TuningKind
    taken_at: str
    machine: tuple[Fact, ...]
    timed: tuple[Timed, ...]
    winner: str
    corrections: tuple[Correction, ...] = ()
    notes: tuple[str, ...] = field(default=())
    others: float = 0.0
    outrun: float = 0.0

    @property
    def was_busy(self) -> bool:
        """Whether other programs took so much of the processor that the figures say little about this machine."""
        return is_busy(self.others)

    @property
    def is_trusted(self) -> bool:
        """Whether its figures may be shown as this machine's, and predictions corrected by them."""
        return not self.was_busy and not self.outrun

    @property
    def won(self) -> Timed | None:
        """The winner's timing."""
        return next((one for one in self.timed if one.contestant.name == self.winner and not one.problem), None)

    @property
    def before(self) -> Timed | None:
        """The timing of how the model ran before; None if that was not timed."""
        return next((one for one in self.timed if one.contestant.is_before), None)

    @property
    def gain(self) -> float | None:
        """How many times as fast as before; None if before, nothing ran."""
        won, before = self.won, self.before
        if won is None or before is None or not before.tokens_per_s:
            return None
        return won.tokens_per_s / before.tokens_per_s


def busy_note(others: float) -> str:
    """A sentence on what was measured while other programs took that share of the processor."""
    return (
        f"Other programs took {others:.0%} of the processor meanwhile, so these figures are lower than what this "
        "machine can do."
    )
