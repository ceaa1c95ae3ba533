"""Requests as rows: what each is doing, from its arrival to its last token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PySide6.QtCore import QCoreApplication, QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QFontMetricsF, QPainter, QPen

from app.theme import themed
from app.widgets.timeline.blocks import bars, span_label
from app.widgets.timeline.colours import faded, text_on
from app.widgets.timeline.viewport import Viewport
from engine.telemetry.lanes import ELSEWHERE, JOB, QUEUED, READING, WRITTEN_ELSEWHERE
from engine.telemetry.records import Records

translate = QCoreApplication.translate

MOST_ROWS = 16
_LABEL_PX = 40


def joined(spans: Records) -> Records:
    """The pieces of each request's phases as one span each, in order of their requests and times."""
    if not len(spans):
        return spans
    spans = np.sort(spans, order=("request", "start_ns"))
    same = (spans["request"][1:] == spans["request"][:-1]) & (spans["name"][1:] == spans["name"][:-1])
    firsts = np.flatnonzero(np.concatenate(([True], ~same)))
    whole = spans[firsts].copy()
    lasts = np.concatenate((firsts[1:], [len(spans)])) - 1
    whole["end_ns"] = spans["end_ns"][lasts]
    whole["count"] = np.add.reduceat(spans["count"], firsts)
    return whole


def rows_of(spans: Records) -> list[int]:
    """The row of each of these joined spans: a request keeps its own, which is free again after it."""
    rows: dict[int, int] = {}
    free: list[int] = []  # when each row becomes free
    arrived = np.argsort(spans["start_ns"], kind="stable")
    ends: dict[int, int] = {}
    for request, end in zip(spans["request"].tolist(), spans["end_ns"].tolist(), strict=True):
        ends[request] = max(end, ends.get(request, end))
    for index in arrived.tolist():
        request, start = int(spans["request"][index]), int(spans["start_ns"][index])
        if request in rows:
            continue
        row = next((number for number, until in enumerate(free) if until <= start), len(free))
        if row == len(free):
            free.append(0)
        free[row] = ends[request]
        rows[request] = row
    return [min(rows[int(request)], MOST_ROWS - 1) for request in spans["request"]]


def request_label(span: np.void, places: Mapping[int, str]) -> str:
    """`writing ×12`, or `written at Rack ×12` where another server answers."""
    place = places.get(int(span["request"]))
    if place is None or int(span["name"]) not in (ELSEWHERE, WRITTEN_ELSEWHERE):
        return span_label(span)
    if int(span["name"]) == ELSEWHERE:
        return translate("Timeline", "waiting for {0}").format(place)
    return translate("Timeline", "written at {0} ×{1}").format(place, int(span["count"]))


def draw_requests(
    painter: QPainter, area: QRectF, spans: Records, viewport: Viewport, colour: QColor, places: Mapping[int, str]
) -> None:
    """Joined spans as bars: hatched while a request waits, pale while it is read, full while it is written; a job's are
    outlined.  `places` name the servers that answer some of them."""
    metrics = QFontMetricsF(painter.font())
    for index, bar in enumerate(bars(area, spans, rows_of(spans), viewport, 1.0)):
        name = int(spans["name"][index])
        waits = name in (QUEUED, ELSEWHERE)
        if waits:
            painter.fillRect(bar, QBrush(faded(colour, 150), Qt.BrushStyle.BDiagPattern))
        elif name == JOB:
            painter.fillRect(bar, faded(colour, 40))
            painter.setPen(QPen(faded(colour, 205), 1))
            painter.drawRect(bar.adjusted(0.5, 0.5, -0.5, -0.5))
        else:
            painter.fillRect(bar, faded(colour, 90 if name == READING else 205))
        text = request_label(spans[index], places)
        inner = bar.intersected(area).adjusted(4, 0, -3, 0)
        has_room = bar.height() >= metrics.height() * 0.8 and inner.width() >= max(
            _LABEL_PX, metrics.horizontalAdvance(text)
        )
        if not waits and has_room:
            painter.setPen(QPen(themed("text") if name in (READING, JOB) else text_on(colour)))
            painter.drawText(inner, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, text)
