"""Named spans and phases, and what one token waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QCoreApplication, QPointF, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QFontMetricsF, QPainter, QPainterPath, QPen, QPolygonF

from app.services.history.history import History, PhaseRun
from app.theme import themed
from app.widgets.quantities import nearest_percent, number
from app.widgets.timeline.lanes import doing_words, track_name
from app.widgets.timeline.navigator import Viewport, duration, faded, text_on
from engine.common.lanes import WORK
from engine.telemetry.analysis import OTHER, critical_path, range_averages, token_ticks
from engine.telemetry.lanes import (
    ATTENTION,
    DECODE,
    DENSE,
    EXPERTS,
    FETCH,
    FOR_LATER,
    HIDDEN,
    POST_FETCH,
    PREFETCH,
    PREFILL,
    READ,
    READ_AHEAD,
    RESULTS,
    SAMPLE,
    WHOLE_LAYER,
    span_name,
)
from engine.telemetry.records import Records, no_spans

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
    steps = history.steps_between(int(at_ns - reach_ns) - 1, int(at_ns + reach_ns) + 1)
    steps = steps[((steps["name"] == DECODE) | (steps["name"] == SAMPLE)) & (steps["tokens"] > 0)]
    if not len(steps):
        return None
    away = abs(steps["end_ns"] - at_ns)
    nearest = int(away.argmin())
    return path_of(history, steps[nearest : nearest + 1]) if away[nearest] <= reach_ns else None


def token_beside(history: History, at_ns: float, direction: int) -> TokenPath | None:
    steps = history.last_steps(1 << 15)
    steps = steps[(steps["name"] == DECODE) & (steps["tokens"] > 0)]
    found = steps[steps["end_ns"] > at_ns][:1] if direction > 0 else steps[steps["end_ns"] < at_ns][-1:]
    return path_of(history, found) if len(found) else None


def path_of(history: History, step: Records) -> TokenPath:
    start, end = int(step["start_ns"][0]), int(step["end_ns"][0])
    spans = history.spans_between(start, end)
    pieces = [
        (piece.start_ns, piece.end_ns, int(spans["lane"][piece.span]) if piece.span >= 0 else -1)
        for piece in critical_path(spans, start, end)
    ]
    return TokenPath(start, end, int(step["step"][0]), pieces)


def averages_text(history: History, start_ns: float, end_ns: float) -> str:
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


translate = QCoreApplication.translate

MOST_ROWS = 4
RUN_PX = 19
_APART_PX = 3
"""Ticks closer together are merged into a band."""
_NAME_PX = 14
"""A narrower block has no room for its name."""
_LETTERS = {
    ATTENTION: "A",
    DENSE: "A",
    EXPERTS: "E",
    FETCH: "W",
    POST_FETCH: "W",
    PREFETCH: "W",
    WHOLE_LAYER: "L",
    HIDDEN: "H",
    RESULTS: "H",
    READ: "R",
    READ_AHEAD: "R",
}
"""Attention, experts, weights being fetched, whole layers, hidden states, reads."""


def fits(spans: Records, viewport: Viewport) -> bool:
    return 0 < len(spans) <= 0.6 * viewport.width


def rows_of(spans: Records) -> list[int]:
    rows = np.zeros(len(spans), np.int64)
    free: list[tuple[int, int]] = []  # each row's (device, time it becomes free)
    for index in np.lexsort((spans["start_ns"], spans["device"])).tolist():
        start, end, device = (int(spans[name][index]) for name in ("start_ns", "end_ns", "device"))
        mine = [row for row, (owner, until) in enumerate(free) if owner == device and until <= start]
        if not mine and len(free) < MOST_ROWS:
            free.append((device, end))
            rows[index] = len(free) - 1
            continue
        row = mine[0] if mine else len(free) - 1
        free[row] = (device, max(end, free[row][1]))
        rows[index] = row
    return [int(row) for row in rows]


def bars(area: QRectF, spans: Records, rows: list[int], viewport: Viewport, least_px: float) -> list[QRectF]:
    """Where each span is drawn: its row, from its start to its end, at least so wide."""
    height = area.height() / (max(rows, default=0) + 1)
    gap = 1.0 if 3 < height < area.height() else 0.0
    lefts, rights = (
        np.clip((spans[name] - viewport.start_ns) / viewport.column_ns, -2, viewport.width + 2).tolist()
        for name in ("start_ns", "end_ns")
    )
    return [
        QRectF(area.left() + left, area.top() + row * height, max(right - left, least_px), height - gap)
        for row, left, right in zip(rows, lefts, rights, strict=True)
    ]


def draw_blocks(
    painter: QPainter, area: QRectF, spans: Records, viewport: Viewport, colour: QColor, *, second: int = -1
) -> None:
    metrics = QFontMetricsF(painter.font())
    names, lanes = spans["name"].tolist(), spans["lane"].tolist()
    for index, rect in enumerate(bars(area, spans, rows_of(spans), viewport, 0.8)):
        later = names[index] in FOR_LATER or lanes[index] == second
        if later:
            painter.fillRect(rect, faded(colour, 85))
            painter.fillRect(rect, QBrush(faded(colour, 190), Qt.BrushStyle.BDiagPattern))
        else:
            painter.fillRect(rect, faded(colour, 225))
        if rect.width() > 3:
            painter.setPen(QPen(colour, 1))
            painter.drawLine(rect.topLeft(), rect.bottomLeft())
        if rect.width() >= _NAME_PX:
            inner = rect.intersected(area).adjusted(3, 0, -2, 0)
            labels = span_labels(spans[index])
            text = next((label for label in labels if metrics.horizontalAdvance(label) <= inner.width()), "")
            if text:
                if later:
                    painter.fillRect(
                        QRectF(inner.left() - 2, inner.center().y() - 8, metrics.horizontalAdvance(text) + 4, 16),
                        faded(colour, 235),
                    )
                painter.setPen(text_on(colour))
                painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, text)


def span_labels(span: np.void) -> tuple[str, ...]:
    """`experts ×7 · layer 12`, and shorter ones: `experts 12`, and `E12` as in the papers' figures."""
    whole, name = span_label(span), span_name(int(span["name"]))
    letter = _LETTERS.get(int(span["name"]), "")
    if span["layer"] < 0:
        return whole, name
    layer = int(span["layer"])
    return (whole, f"{name} {layer}", *((f"{letter}{layer}", letter) if letter else ()))


def span_label(span: np.void) -> str:
    """`experts ×7 · layer 12`."""
    text = span_name(int(span["name"]))
    if span["count"] > 1:
        text += f" ×{int(span['count'])}"
    if span["layer"] >= 0:
        text += " · " + translate("Timeline", "layer {0}").format(int(span["layer"]))
    if span["expert"] >= 0:
        text += " · " + translate("Timeline", "expert {0}").format(int(span["expert"]))
    return text


def draw_phases(painter: QPainter, area: QRectF, history: History, viewport: Viewport) -> None:
    """Runs of prefill and decode, with a tick per token."""
    metrics = QFontMetricsF(painter.font())
    for run in history.runs_between(viewport.start_ns, viewport.end_ns):
        left, right = max(viewport.x(run.start_ns), -2.0), min(viewport.x(run.end_ns), viewport.width + 2.0)
        rect = QRectF(area.left() + left, area.top(), max(right - left, 1.0), RUN_PX)
        is_prefill = run.phase == PREFILL
        painter.fillRect(rect, themed("accent_background" if is_prefill else "hover"))
        painter.fillRect(QRectF(rect.left(), rect.top(), min(2.0, rect.width()), RUN_PX), themed("faint"))
        inner = rect.intersected(area).adjusted(7, 0, -4, 0)
        text = next((text for text in run_labels(run) if metrics.horizontalAdvance(text) <= inner.width()), "")
        if text:
            painter.setPen(themed("accent_text" if is_prefill else "text"))
            painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, text)
    ticks = visible_ticks(history, viewport)
    top, bottom = area.top() + RUN_PX + 2, area.top() + RUN_PX + 8
    painter.setPen(QPen(themed("muted"), 1))
    for at in ticks:
        x = area.left() + viewport.x(at)
        painter.drawLine(QPointF(x, top), QPointF(x, bottom))
    if not ticks and viewport.column_ns < 1e9:
        for run in history.runs_between(viewport.start_ns, viewport.end_ns):
            if run.phase == DECODE:  # more ticks than pixels: a band
                left, right = max(viewport.x(run.start_ns), 0.0), min(viewport.x(run.end_ns), float(viewport.width))
                band = QRectF(area.left() + left, top, max(right - left, 1.0), bottom - top)
                painter.fillRect(band.adjusted(0, 1, 0, -2), faded(themed("muted"), 110))


def visible_ticks(history: History, viewport: Viewport) -> list[int]:
    """Times of tokens, if they are far enough apart to be drawn separately."""
    runs = history.runs_between(viewport.start_ns, viewport.end_ns)
    tokens = sum(run.tokens for run in runs if run.phase == DECODE)
    longest = sum(run.end_ns - run.start_ns for run in runs if run.phase == DECODE)
    if viewport.span_ns > 120e9 or tokens * _APART_PX * viewport.column_ns > 2 * longest:
        return []  # far too many: do not even read them
    moments = token_ticks(history.steps_between(int(viewport.start_ns), int(viewport.end_ns)))
    if len(moments) < 2:
        return [int(at) for at in moments]
    apart = float(np.median(np.diff(moments))) / viewport.column_ns
    return [int(at) for at in moments] if apart >= _APART_PX else []


def run_labels(run: PhaseRun) -> tuple[str, ...]:
    """`prefill 812 tokens`, and shorter ones."""
    name = span_name(run.phase)
    if run.tokens <= 0:
        return (name,)
    return translate("Timeline", "{0} {1} tokens").format(name, run.tokens), f"{name} {run.tokens}", name


def path_through(areas: dict[int, QRectF], pieces: list[tuple[float, float, int]]) -> QPainterPath:
    """A critical path: outlines in the lanes that a token waited for, connected across lanes.

    Args:
        areas: plot of each visible engine lane.
        pieces: (left, right, lane), from left to right; lane -1 is time not spent in any lane.
    """
    path = QPainterPath()
    follows = False
    for left, right, lane in pieces:
        area = areas.get(lane)
        if area is not None:
            if follows and abs(path.currentPosition().y() - area.center().y()) > 1:
                path.lineTo(left, area.center().y())
            path.addPolygon(QPolygonF(QRectF(left, area.top(), right - left, area.height())))
            path.moveTo(right, area.center().y())
        follows = area is not None
    return path
