"""How benchmarks measure and report: contestants in turn, figures in pairs, and who could not run, with reasons."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from typing import Any, TypeVar

_CONFIDENCE = 0.95
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One measured figure.

    Attributes:
        value: median over `repeats` runs, in `unit`.
        peer, peer_value: the contestant in the same run, and its median.
        ratio: ours over the peer's, inverted if necessary so that above 1 is better for us.
        ratios: the lowest and the highest of single pairs of runs.
        likely: between these the true median of the ratio lies with a confidence of 95% or more; None for fewer than
            six pairs, which cannot say.
        limit: the physical limit in the same unit; `of_limit` is the fraction reached.
        predicted: the machine model's value for the ratio, or for the value without a peer; `deviation` is how far the
            measurement is above it (0.1 is 10%).
    """

    name: str
    value: float
    unit: str
    repeats: int
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    limit: float | None = None
    of_limit: float | None = None
    predicted: float | None = None
    deviation: float | None = None
    ratios: tuple[float, float] | None = None
    likely: tuple[float, float] | None = None


def row(
    name: str,
    values: list[float],
    unit: str,
    *,
    peer: str | None = None,
    peer_values: list[float] | None = None,
    limit: float | None = None,
    predicted: float | None = None,
    higher_is_better: bool = True,
) -> ReportRow:
    """A row from repeated measurements taken in turn; the ratio is the median of the paired ratios."""
    value = statistics.median(values)
    peer_value = ratio = ratios = likely = None
    if peer_values:
        peer_value = statistics.median(peer_values)
        pairs = zip(values, peer_values, strict=True)
        each = sorted(ours / theirs if higher_is_better else theirs / ours for ours, theirs in pairs)
        ratio, ratios, likely = statistics.median(each), (each[0], each[-1]), median_interval(each)
    of_limit = None
    if limit:
        of_limit = value / limit if higher_is_better else limit / max(value, 1e-9)
    measured = value if ratio is None else ratio
    deviation = measured / predicted - 1 if predicted else None
    return ReportRow(
        name, value, unit, len(values), peer, peer_value, ratio, limit, of_limit, predicted, deviation, ratios, likely
    )


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Between these of the values, in ascending order, the median of what they were drawn from lies with 95% or more.

    Each value is above it with a chance of one half, whatever the distribution (the sign test's interval; Conover,
    Practical Nonparametric Statistics, section 3.2).  None: there are too few to say.
    """
    count, outside, left_out = len(values), 0.0, 0
    while left_out < count // 2:
        outside += 2 * comb(count, left_out) / 2**count
        if outside > 1 - _CONFIDENCE:
            break
        left_out += 1
    return (values[left_out - 1], values[count - left_out]) if left_out else None


@dataclass(slots=True)
class Report:
    machine: dict[str, Any]
    rows: list[ReportRow] = field(default_factory=list)
    peers_not_run: list[dict[str, str]] = field(default_factory=list)

    def add(self, name: str, values: list[float], unit: str, **options: Any) -> ReportRow:
        self.rows.append(row(name, values, unit, **options))
        return self.rows[-1]

    def add_against(self, name: str, ours: list[float], others: Mapping[str, list[float]]) -> None:
        """Tokens per second."""
        self.add(name, ours, "tokens/s")
        for peer, theirs in others.items():
            self.add(name, ours, "tokens/s", peer=peer, peer_values=theirs)

    def skip_peer(self, peer: str, reason: str) -> None:
        """Reports a peer that could not run, and why, instead of omitting it silently."""
        self.peers_not_run.append({"peer": peer, "reason": reason})

    def document(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "rows": [asdict(entry) for entry in self.rows],
            "peers_not_run": self.peers_not_run,
        }

    def text(self) -> str:
        width = max([52, *(len(_label(entry)) for entry in self.rows)])
        lines = [f"{'':{width}} {'value':>10}  {'unit':9} {'peer':>10} {'ratio':>7} {'of limit':>9} {'predicted':>10}"]
        for entry in self.rows:
            line = (
                f"{_label(entry):{width}} {entry.value:>10.3f}  {entry.unit:9} "
                f"{_cell(entry.peer_value, '10.3f')} {_cell(entry.ratio, '6.2f', 'x')} {_cell(entry.of_limit, '9.0%')} "
                f"{_cell(entry.predicted, '10.2f')} {_cell(entry.deviation, '+5.0%')}"
            )
            lines.append(line.rstrip() + _spread(entry))
        lines += [f"not run: {skipped['peer']} ({skipped['reason']})" for skipped in self.peers_not_run]
        return "\n".join(lines)


class PeerError(Exception):
    """A contestant cannot run, or cannot go on; the message is one sentence."""


def in_turn(
    contestants: Mapping[str, Callable[[int], _T]],
    repeats: int,
    report: Report,
    say: Callable[[str], None],
    *,
    warm_ups: int = 1,
    what: str = "",
    order: Callable[[int, list[str]], list[str]] = lambda _repeat, names: names,
) -> dict[str, list[_T]]:
    """What each contestant gave in each repeat: one after the other, so that noise affects all alike.

    One that raises `PeerError` is reported, and left out from then on.

    Args:
        contestants: called with the number of the repeat; from 0 down they are warm-ups, which do not count.
        what: for people, what is measured.
        order: of the contestants in a repeat, where it is not to be the same each time.
    """
    found: dict[str, list[_T]] = {name: [] for name in contestants}
    for repeat in range(1 - warm_ups, repeats + 1):
        for name in order(repeat, list(found)):
            turn = f"repeat {repeat} of {repeats}" if repeat > 0 else "warm-up"
            say(f"{what}{', ' if what else ''}{turn}: {name}")
            try:
                value = contestants[name](repeat)
            except PeerError as failure:
                report.skip_peer(name, str(failure))
                del found[name]
                continue
            if repeat > 0:
                found[name].append(value)
    return found


def there_and_back(repeat: int, names: list[str]) -> list[str]:
    """An order: the last of one repeat is the first of the next."""
    return names if repeat % 2 else names[::-1]


def _label(entry: ReportRow) -> str:
    return f"{entry.name} vs {entry.peer}" if entry.peer else entry.name


def _cell(value: float | None, form: str, suffix: str = "") -> str:
    width = int(form.split(".")[0]) + len(suffix)
    return " " * width if value is None else f"{value:{form}}{suffix}"


def _spread(entry: ReportRow) -> str:
    """How far single pairs of runs differ."""
    if entry.ratios is None or entry.repeats < 2:
        return ""
    spread = f"  pairs {entry.ratios[0]:.2f} to {entry.ratios[1]:.2f}"
    return spread if entry.likely is None else f"{spread}, 95%: {entry.likely[0]:.2f} to {entry.likely[1]:.2f}"
