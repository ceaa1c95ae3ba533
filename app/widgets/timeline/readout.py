"""Texts about a moment, a range, and one token."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication

from app.services.history.history import History
from app.widgets.quantities import nearest_percent, number
from app.widgets.timeline.lanes import doing_words, track_name
from app.widgets.timeline.navigator import duration
from engine.common.lanes import WORK
from engine.telemetry.analysis import OTHER, critical_path, range_averages
from engine.telemetry.lanes import DECODE, SAMPLE
from engine.telemetry.records import Records, no_spans

translate = QCoreApplication.translate

_LONGEST_S = 120.0
"""Averages of longer ranges are computed from sums, not from spans."""


@dataclass(frozen=True)
class TokenPath:
    """What one token waited for.

    Attributes:
        pieces: (start, end, lane of the engine or -1), nanoseconds, without gaps.
    """

    start_ns: int
    end_ns: int
    step: int
    pieces: list[tuple[int, int, int]]

    def text(self) -> str:
        """`Token 113: 41 ms. Waited 61% for CPU experts, 20% for ...`."""
        spent: dict[str, int] = {}
        for start, end, lane in self.pieces:
            name = WORK[lane] if 0 <= lane < len(WORK) else OTHER
            spent[name] = spent.get(name, 0) + end - start
        total = max(1, self.end_ns - self.start_ns)
        shares = sorted(spent.items(), key=lambda item: -item[1])
        parts = [
            f"{number(100 * took / total, 0)}% {doing_words(name)}" for name, took in shares if took > 0.005 * total
        ]
        head = translate("Timeline", "Token of step {0}: {1}").format(self.step, duration(total))
        return f"{head} · {', '.join(parts)}"


def token_at(history: History, at_ns: float, reach_ns: float) -> TokenPath | None:
    """The token whose tick is closest to a moment, within `reach_ns`; None if there is none."""
    steps = history.steps_between(int(at_ns - reach_ns) - 1, int(at_ns + reach_ns) + 1)
    steps = steps[((steps["name"] == DECODE) | (steps["name"] == SAMPLE)) & (steps["tokens"] > 0)]
    if not len(steps):
        return None
    away = abs(steps["end_ns"] - at_ns)
    nearest = int(away.argmin())
    return path_of(history, steps[nearest : nearest + 1]) if away[nearest] <= reach_ns else None


def token_beside(history: History, at_ns: float, direction: int) -> TokenPath | None:
    """The token after a moment, or before it."""
    steps = history.last_steps(1 << 15)
    steps = steps[(steps["name"] == DECODE) & (steps["tokens"] > 0)]
    found = steps[steps["end_ns"] > at_ns][:1] if direction > 0 else steps[steps["end_ns"] < at_ns][-1:]
    return path_of(history, found) if len(found) else None


def path_of(history: History, step: Records) -> TokenPath:
    """The critical path of one step, [1]."""
    start, end = int(step["start_ns"][0]), int(step["end_ns"][0])
    spans = history.spans_between(start, end)
    pieces = [
        (piece.start_ns, piece.end_ns, int(spans["lane"][piece.span]) if piece.span >= 0 else -1)
        for piece in critical_path(spans, start, end)
    ]
    return TokenPath(start, end, int(step["step"][0]), pieces)


def averages_text(history: History, start_ns: float, end_ns: float) -> str:
    """Averages over a range, in one line."""
    averages = range_averages(
        history.spans_between(int(start_ns), int(end_ns)) if end_ns - start_ns < _LONGEST_S * 1e9 else no_spans(),
        history.steps_between(int(start_ns), int(end_ns)),
        int(start_ns),
        int(end_ns),
    )
    parts = [duration(end_ns - start_ns)]
    if averages.tokens:
        rate = translate("Timeline", "{0} tokens at {1}/s")
        parts.append(rate.format(averages.tokens, number(averages.tokens_per_s, 1)))
    for lane, share in sorted(averages.busy.items(), key=lambda item: -item[1]):
        parts.append(f"{track_name(lane)} {nearest_percent(share)}")
    for lane, rate_gb in averages.gigabytes_per_s.items():
        parts.append(f"{track_name(lane)} {translate('Fit', '{0} GB/s').format(number(rate_gb, 2))}")
    for counter, words in (
        ("hits", translate("Timeline", "{0} hits per token")),
        ("fetched", translate("Timeline", "{0} fetched")),
        ("on_cpu", translate("Timeline", "{0} on the CPU")),
    ):
        if counter in averages.per_token:
            parts.append(words.format(number(averages.per_token[counter], 1)))
    return " · ".join(parts)
