"""The timeline's axes: lane names and readings beside the plots, times below them."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication, QRectF, Qt
from PySide6.QtGui import QFont, QFontMetricsF, QPainter
from PySide6.QtWidgets import QWidget

from app.theme import themed
from app.widgets.chart import Axis
from app.widgets.scaffold import MARK_PX
from app.widgets.timeline.lanes import lane_words, reading
from app.widgets.timeline.picture import GUTTER_GAP_PX, LaneRow, caption_font, sizes_for, title_font

translate = QCoreApplication.translate

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
