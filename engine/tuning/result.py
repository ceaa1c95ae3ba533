"""A timing of real tokens, and the result of a tuning run: timings, the winner, and corrections of predictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from engine.common.config import EngineConfig

if TYPE_CHECKING:
    from engine.protocol import TuningNumber


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


def report_text(result: TuningResult, *, saved: bool = True) -> str:
    """The whole result as plain text: machine, contestants with prediction and timing, winner, before and after.

    Args:
        saved: whether it is saved and in use.
    """
    width = max((len(one.contestant.name) for one in result.timed), default=0)
    lines = [
        f"{result.model}, tuned on {day(result.taken_at)} ({result.kind})",
        *(f"  {fact.name}: {fact.value}" for fact in result.machine),
        "",
        f"{'':<{width}}  {'timed':>9} {'predicted':>10} {'off by':>7} {'TTFT, s':>8}  tokens/s at batch 1",
        *(_line(one, result, width) for one in result.timed),
        "",
        verdict(result, saved=saved),
    ]
    remarks = [*result.notes, *(note for note in dict.fromkeys(one.note for one in result.timed) if note)]
    return "\n".join([*lines, *remarks])


def verdict(result: TuningResult, *, saved: bool = True) -> str:
    """The winner and its gain, in one or two sentences."""
    won, before = result.won, result.before
    if won is None:
        return "None of them could run: the settings are unchanged."
    if not saved:
        best = f"Best: {won.contestant.name}, {won.tokens_per_s:.1f} tokens/s. It is not saved."
        return best + _why_not_fastest(result, won)
    if won.contestant.is_before:
        return f"The settings stay the same: {won.tokens_per_s:.1f} tokens/s, and nothing else is better."
    text = f"From now on: {won.contestant.name}, {won.tokens_per_s:.1f} tokens/s."
    if before is not None and before.tokens_per_s:
        text += f" Before: {before.tokens_per_s:.1f} tokens/s, so {won.tokens_per_s / before.tokens_per_s:.2f} times."
    elif before is not None:
        text += " Before, it could not run."
    return text + _why_not_fastest(result, won)


def _why_not_fastest(result: TuningResult, won: Timed) -> str:
    faster = next((one for one in result.timed if one.tokens_per_s > won.tokens_per_s), None)
    if faster is None:
        return ""
    return f" {faster.precision} would be faster, but not by enough to justify its loss of quality."


def number_text(number: TuningNumber) -> str:
    """`33.1 GB/s, 2 threads`."""
    if number.unit == "bytes/s":
        value = f"{number.value / 1e9:.3g} GB/s"
    elif number.unit == "flop/s":
        value = f"{number.value / 1e12:.3g} Tflop/s"
    else:
        value = f"{number.value:.1f} tokens/s"
    return f"{value}, {number.detail}" if number.detail else value


def _line(one: Timed, result: TuningResult, width: int) -> str:
    name = f"{one.contestant.name:<{width}}"
    predicted = one.contestant.predicted_tokens_per_s
    if one.problem:
        return f"{name}  {'-':>9} {predicted:>10.1f} {'':>7} {'':>8}  {one.problem}"
    off = f"{predicted / one.tokens_per_s - 1:+.0%}" if predicted else ""
    marks = [
        "chosen" if one.contestant.name == result.winner else "",
        "the plan" if one.contestant.is_plan else "",
        "as before" if one.contestant.is_before else "",
    ]
    said = ", ".join(filter(None, marks))
    return f"{name}  {one.tokens_per_s:>9.1f} {predicted:>10.1f} {off:>7} {one.ttft_s:>8.2f}  {said}".rstrip()


def day(taken_at: str) -> str:
    """`21 Nov 2026` of an ISO time; the text itself if it is not a time."""
    try:
        moment = datetime.fromisoformat(taken_at).astimezone()
    except ValueError:
        return taken_at
    return f"{moment.day} {moment:%b %Y}"
