"""What the timeline's scene is made of: the lanes as one item with a cached picture, and both axes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QCoreApplication, QPointF, QRectF, Qt
from PySide6.QtGui import (
    QBrush,
    QColor,
    QFont,
    QFontInfo,
    QFontMetrics,
    QFontMetricsF,
    QPaintEngine,
    QPainter,
    QPen,
    QPixmap,
)
from PySide6.QtWidgets import QWidget

from app.services.history.history import History
from app.theme import tabular, themed
from app.widgets.chart import Axis
from app.widgets.quantities import number
from app.widgets.scaffold import MARK_PX
from app.widgets.timeline.blocks import bars, draw_blocks, draw_phases, fits, span_label
from app.widgets.timeline.lanes import LaneData, lane_titles, lane_words, read_lane, reading, tracks_of
from app.widgets.timeline.navigator import Viewport, faded, text_on
from app.widgets.timeline.plots import draw_lane
from engine.common.lanes import Lane
from engine.telemetry.lanes import CPU_ATTENTION, ELSEWHERE, JOB, QUEUED, READING, WRITTEN_ELSEWHERE
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


RIGHT_PX = 16
LANE_GAP_PX = 9
GUTTER_GAP_PX = 10
_NAME_GAP_PX = 6
_LEAST_GUTTER_PX = 118
_WIDEST_READING = "↓ 888.8 ↑ 88.8 MB/s"
_LEAST_AXIS_PX = 24
_LEAST_LANE_PX = 27
_LEAST_PHASE_PX = 32
_NAME_MARGIN_PX = 6
"""How far a lane's name and reading may extend beyond its plot, into the gap to the next."""
_BLOCKS_BELOW_NS = 3e9
_REQUESTS_BELOW_NS = 130e9
"""Spans are drawn one by one only in shorter ranges: in longer ones there are always too many."""


@dataclass
class LaneRow:
    """A lane, its plot's position, and its data."""

    lane: Lane
    area: QRectF
    data: LaneData
    blocks: Records | None = None


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Sizes in pixels that the timeline's text needs.

    Attributes:
        gutter: width to the left of the plots: the longest lane name and its help mark.
        lane: minimum height of a plot, so that name and reading fit.
        phase: height of the phase lane.
        axis: height of the times below.
    """

    gutter: int
    lane: int
    phase: int
    axis: int


def sizes_for(font: QFont) -> TextSizes:
    return _sizes(font.toString())


@functools.lru_cache(maxsize=8)
def _sizes(described: str) -> TextSizes:
    font = QFont()
    font.fromString(described)
    title, caption, axis = (QFontMetrics(one) for one in (title_font(font), caption_font(font), axis_font(font)))
    longest = max(map(title.horizontalAdvance, lane_titles()))
    # In small fonts the help mark overlaps the reading's line.
    longest = max(longest + _NAME_GAP_PX, caption.horizontalAdvance(_WIDEST_READING) + 1)
    beside = title.height() + caption.height() - _NAME_MARGIN_PX
    return TextSizes(
        gutter=max(_LEAST_GUTTER_PX, longest + MARK_PX + GUTTER_GAP_PX),
        lane=max(_LEAST_LANE_PX, beside),
        phase=max(_LEAST_PHASE_PX, beside),
        axis=max(_LEAST_AXIS_PX, axis.height() + 6),
    )


def title_font(font: QFont) -> QFont:
    result = scaled(font, 0.9)
    result.setWeight(QFont.Weight.DemiBold)
    return result


def caption_font(font: QFont) -> QFont:
    return scaled(tabular(font), 0.8)


def axis_font(font: QFont) -> QFont:
    return scaled(tabular(font), 0.82)


def least_height(lanes: list[Lane], font: QFont) -> int:
    sizes = sizes_for(font)
    own = sum(sizes.phase if lane.kind == "phase" else sizes.lane for lane in lanes)
    return own + LANE_GAP_PX * (len(lanes) + 1) + sizes.axis


def lane_areas(lanes: list[Lane], width: float, height: float, font: QFont) -> list[QRectF]:
    sizes = sizes_for(font)
    room = height - LANE_GAP_PX * len(lanes)
    highs: dict[str, float] = {lane.key: sizes.phase for lane in lanes if lane.kind == "phase"}
    while True:
        others = [lane for lane in lanes if lane.key not in highs]
        unit = (room - sum(highs.values())) / max(sum(lane.weight for lane in others), 1e-9)
        low = [lane.key for lane in others if unit * lane.weight < sizes.lane]
        if not low:
            break
        highs |= dict.fromkeys(low, float(sizes.lane))
    areas, top = [], float(LANE_GAP_PX) / 2
    for lane in lanes:
        own = highs.get(lane.key, unit * lane.weight)
        areas.append(QRectF(0, round(top), max(width, 1.0), round(own)))
        top += own + LANE_GAP_PX
    return areas


def read_rows(
    lanes: list[Lane], areas: list[QRectF], history: History, viewport: Viewport, ceilings: dict[str, float]
) -> list[LaneRow]:
    spans: Records | None = None
    if viewport.span_ns < _BLOCKS_BELOW_NS:
        spans = history.spans_between(int(viewport.start_ns), int(viewport.end_ns) + 1)
    rows = []
    for lane, area in zip(lanes, areas, strict=True):
        row = LaneRow(lane, area, read_lane(lane, history, viewport, ceilings))
        if lane.kind == "requests" and viewport.span_ns < _REQUESTS_BELOW_NS:
            mine = joined(history.requests_between(int(viewport.start_ns), int(viewport.end_ns) + 1))
            row.blocks = mine if fits(mine, viewport) else None
        elif spans is not None and lane.tracks and lane.kind not in ("phase", "requests"):
            mine = spans[np.isin(spans["lane"], tracks_of(lane))]
            if fits(mine, viewport) or (viewport.span_ns < 5e7 and len(mine)):
                row.blocks = mine
        rows.append(row)
    return rows


class LanesItem(pg.GraphicsObject):  # type: ignore[misc]
    """All lanes of a view in one item, in its pixels: painted as a picture on a screen, as paths into an export.

    The picture is drawn when the view is about to be painted, and kept until `forget`.
    """

    def __init__(self, view: pg.ViewBox) -> None:
        super().__init__()
        self.rows: list[LaneRow] = []
        self._picture: QPixmap | None = None
        self._draw: Callable[[QPainter], None] = lambda _painter: None
        self.setParentItem(view)
        self.setZValue(-1)
        view.sigResized.connect(lambda _view: self.prepareGeometryChange())

    def forget(self) -> None:
        self._picture = None

    def prepare(self, ratio: float, rows: Callable[[], list[LaneRow]], draw: Callable[[QPainter], None]) -> bool:
        """Reads and draws the rows for a screen with so many pixels per unit; False if that is done already."""
        if self._picture is not None and self._picture.devicePixelRatio() == ratio:
            return False
        area = self.boundingRect()
        self.rows, self._draw = rows(), draw
        self._picture = QPixmap(max(round(area.width() * ratio), 1), max(round(area.height() * ratio), 1))
        self._picture.setDevicePixelRatio(ratio)
        self._picture.fill(Qt.GlobalColor.transparent)
        painter = QPainter(self._picture)
        draw(painter)
        painter.end()
        return True

    def boundingRect(self) -> QRectF:
        return QRectF(self.parentItem().rect())

    def paint(self, painter: QPainter, _option: object, _widget: object) -> None:
        is_drawing = painter.paintEngine().type() == QPaintEngine.Type.SVG
        if is_drawing or self._exportOpts or self._picture is None:
            self._draw(painter)
        else:
            painter.drawPixmap(QPointF(0, 0), self._picture)


def draw_rows(painter: QPainter, rows: list[LaneRow], history: History, viewport: Viewport) -> None:
    if not rows:
        return
    left, right = rows[0].area.left(), rows[0].area.right()
    xs = left + (viewport.edges() - viewport.start_ns) / viewport.column_ns
    border = QPen(themed("border"), 1)
    for row in rows:
        painter.setPen(border)
        base = row.area.bottom() + LANE_GAP_PX / 2
        painter.drawLine(QPointF(row.area.left(), base), QPointF(right, base))
        painter.save()
        painter.setClipRect(row.area.adjusted(0, -1, 0, 1))
        colour = themed(row.lane.colour)
        if row.lane.kind == "phase":
            draw_phases(painter, row.area, history, viewport)
        elif row.lane.kind == "requests" and row.blocks is not None:
            draw_requests(painter, row.area, row.blocks, viewport, colour, history.places)
        elif row.blocks is not None:
            draw_blocks(painter, row.area, row.blocks, viewport, colour, second=CPU_ATTENTION)
        else:
            draw_lane(painter, row.area, xs, row.lane, row.data, colour)
        painter.restore()
        if row.data.ceiling is not None and row.blocks is None:
            _draw_ceiling_label(painter, row)
    _draw_marks(painter, rows, history, viewport)


def scaled(font: QFont, part: float) -> QFont:
    result = QFont(font)
    result.setPixelSize(max(9, round(QFontInfo(font).pixelSize() * part)))
    return result


def _draw_ceiling_label(painter: QPainter, row: LaneRow) -> None:
    y = row.area.bottom() - row.area.height() * (row.data.ceiling or 0) / row.data.scale
    text = translate("Timeline", "ceiling {0} GB/s").format(number((row.data.ceiling or 0) / 1e9, 1))
    painter.setPen(themed("muted"))
    at = QRectF(row.area.left(), y + 1, row.area.width() - 4, painter.fontMetrics().height())
    painter.drawText(at, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignTop, text)


def _draw_marks(painter: QPainter, rows: list[LaneRow], history: History, viewport: Viewport) -> None:
    top, bottom = rows[0].area.top(), rows[-1].area.bottom()
    last_right = -1e9
    for mark in history.marks_between(viewport.start_ns, viewport.end_ns):
        x = rows[0].area.left() + viewport.x(mark.at_ns)
        painter.setPen(QPen(themed("muted"), 1, Qt.PenStyle.DotLine))
        painter.drawLine(QPointF(x, top), QPointF(x, bottom))
        if x > last_right:
            painter.setPen(themed("muted"))
            width, high = painter.fontMetrics().horizontalAdvance(mark.text), painter.fontMetrics().height()
            to_left = x - width - 8 > max(last_right, rows[0].area.left()) or x + width + 8 > rows[0].area.right()
            box = QRectF(x - width - 4 if to_left else x + 4, rows[0].area.bottom() + 3 - high, width + 2, high)
            painter.drawText(box, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, mark.text)
            last_right = x + width + 8


_ROUND_S = (10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
_LINE = int(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
_WRAPPED = int(_LINE | Qt.TextFlag.TextWordWrap)


@dataclass(frozen=True, slots=True)
class GutterLabel:
    """Text to the left of a plot.

    Attributes:
        whole: the full text; `shown` is elided if it does not fit.
        is_title: the lane's name, not its reading.
    """

    area: QRectF
    whole: str
    shown: str
    is_title: bool


class TimeAxis(Axis):
    """Seconds, in round minutes and hours where there are many."""

    def tickSpacing(self, low: float, high: float, size: float) -> list[tuple[float, float]]:
        (wanted, start), *_ = super().tickSpacing(low, high, size)
        return [(next((each for each in _ROUND_S if each >= wanted), _ROUND_S[-1]) if wanted > 5 else wanted, start)]


class LaneAxis(Axis):
    """In place of numbers, each lane's name and its reading."""

    def __init__(self) -> None:
        super().__init__("left")
        self.labels: list[GutterLabel] = []
        self._font = QFont()

    def dress(self, chart: QWidget) -> None:
        super().dress(chart)
        self._font = chart.font()
        self.setWidth(sizes_for(self._font).gutter)

    def show_rows(self, rows: list[LaneRow], column: int) -> None:
        self.labels = gutter_labels(rows, column, self._font)
        self.picture = None
        self.update()

    def generateDrawSpecs(self, _painter: QPainter) -> tuple[list[GutterLabel]]:
        return (self.labels,)

    def drawPicture(self, painter: QPainter, labels: list[GutterLabel]) -> None:
        title, caption = title_font(self._font), caption_font(self._font)
        for label in labels:
            painter.setFont(title if label.is_title else caption)
            painter.setPen(themed("text" if label.is_title else "muted"))
            painter.drawText(label.area, _WRAPPED if label.shown == label.whole else _LINE, label.shown)


def gutter_labels(rows: list[LaneRow], column: int, font: QFont) -> list[GutterLabel]:
    title, caption = QFontMetricsF(title_font(font)), QFontMetricsF(caption_font(font))
    width = float(sizes_for(font).gutter - GUTTER_GAP_PX)
    found = []
    for row in rows:
        line = QRectF(0, row.area.top() - 1, width - MARK_PX, title.height())
        name = lane_words(row.lane.title)
        shown = title.elidedText(name, Qt.TextElideMode.ElideRight, line.width())
        found.append(GutterLabel(line, name, shown, is_title=True))
        below = QRectF(0, line.bottom(), width, row.area.bottom() + 5 - line.bottom())
        is_phase = row.lane.kind == "phase"
        text = translate("Timeline", "token ticks") if is_phase else reading(row.lane, row.data, column)
        if text:
            wrapped = caption.boundingRect(below, _WRAPPED, text)
            fits = wrapped.height() <= below.height() + 1 and wrapped.width() <= below.width() + 1
            shown = text if fits else caption.elidedText(text, Qt.TextElideMode.ElideRight, below.width())
            found.append(GutterLabel(below, text, shown, is_title=False))
    return found
