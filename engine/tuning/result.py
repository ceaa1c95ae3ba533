"""A timing of real tokens, and the result of a tuning run: timings, the winner, and corrections of predictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.common.config import EngineConfig


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Decoding at batch 1.

    Attributes:
        tokens_per_s: after the first token; 0 if fewer than two.
        ttft_s: time to first token.
        tokens: tokens timed.
    """

    tokens_per_s: float
    ttft_s: float
    tokens: int


TuningKind = Literal["quick", "thorough"]
TUNING_KINDS: tuple[TuningKind, ...] = ("quick", "thorough")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A configuration to time.

    Attributes:
        name: display name, unique within its run: `int8, Switchyard mixed, 2 threads`.
        config: exact settings for the engine.
        predicted_tokens_per_s, low, high: decoding, corrected by earlier timings; 0 if it cannot be predicted.
        is_before: the current settings; may also be the plan.
        is_plan: the planner's first choice.
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
    """A timed contestant.

    Attributes:
        tokens_per_s: median of `rates`, decoding without the first token; 0 if it failed.
        rates: of each repeat.
        ttft_s: median time to first token of a short prompt.
        load_s: duration of the first load.
        device, precision, threads: as actually loaded; empty and 0 if it was not.
        note: the engine's note on loading it, such as a fallback to the CPU.
        problem: why it could not be timed, as a sentence; empty on success.
        others: CPU share of other programs meanwhile, 0 to 1.
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
    """A factor of predictions: timed speed over modelled speed.

    Attributes:
        precision: of the experts.
        on_card: whether a card was used.
        threads: of the CPU.
    """

    precision: str
    on_card: bool
    threads: int
    factor: float


@dataclass(frozen=True, slots=True)
class Fact:
    """Part of the machine that a result depends on: `graphics card`, `none`."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class TuningResult:
    """A finished run.

    Attributes:
        model: display name; `model_mark` identifies its files (see `engine.tuning.saved_results.model_mark`).
        asked: the settings that were tuned: the result fills those that are `auto` or None.
        taken_at: ISO 8601, UTC.
        machine: the tuned machine (`engine.hardware.measured.described`).
        timed: the fastest first, failed ones last.
        winner: name of the contestant used from now on; empty if none could run.
        corrections: see `Correction`.
        notes: sentences for the user.
        others: the largest CPU share of other programs during the run.
        outrun: tokens/s reached later with it, if far above the timing; otherwise 0.
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
        """Whether other programs used so much CPU that the figures are unreliable."""
        from engine.hardware.probe import is_busy  # only now: the window begins with these messages

        return is_busy(self.others)

    @property
    def is_trusted(self) -> bool:
        """Whether its figures may be shown, and used to correct predictions."""
        return not self.was_busy and not self.outrun

    @property
    def won(self) -> Timed | None:
        return next((one for one in self.timed if one.contestant.name == self.winner and not one.problem), None)

    @property
    def before(self) -> Timed | None:
        return next((one for one in self.timed if one.contestant.is_before), None)

    @property
    def gain(self) -> float | None:
        """Speedup over the earlier settings; None if those could not run."""
        won, before = self.won, self.before
        if won is None or before is None or not before.tokens_per_s:
            return None
        return won.tokens_per_s / before.tokens_per_s


def busy_note(others: float) -> str:
    """A sentence on measurements taken while other programs used that share of the CPU."""
    return (
        f"Other programs used {others:.0%} of the CPU meanwhile, so these figures are lower than what this "
        "machine can do."
    )
