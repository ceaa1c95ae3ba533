"""What all charts share: pyqtgraph's view and axes, in the theme's colours and fonts, without its menus and buttons.

Importing this imports pyqtgraph, which takes a moment: see `app.widgets.charts_ready`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyqtgraph as pg
import pyqtgraph.exporters
from PySide6.QtCore import QEvent, QPoint, QPointF, QRect, QRectF, Qt
from PySide6.QtGui import (
    QBrush,
    QColor,
    QFontInfo,
    QFontMetrics,
    QHelpEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPen,
    QResizeEvent,
    QTransform,
)
from PySide6.QtSvg import QSvgGenerator
from PySide6.QtWidgets import QGraphicsGridLayout, QGraphicsSceneWheelEvent, QGraphicsView, QToolTip, QWidget

from app.theme import colours, themed
from app.widgets.chip import small_font

pg.setConfigOptions(antialias=True, mouseRateLimit=0)

if TYPE_CHECKING:  # pyqtgraph has no types
    from PySide6.QtWidgets import QGraphicsView as _GraphicsView
else:
    _GraphicsView = pg.GraphicsView

_TEXT_PX = 11.5
_SAMPLE_PX = 36
"""Of a legend, with the gaps around it."""
_PLACES = {"top": (0, 1), "left": (1, 0), "right": (1, 2), "bottom": (2, 1)}


class Axis(pg.AxisItem):  # type: ignore[misc]
    def __init__(
        self, side: str, words: Callable[[float], str] | None = None, *, grid: bool = False, widest: str = ""
    ) -> None:
        """`widest` is the longest of its numbers, if it stands upright: it would else be known only once painted."""
        super().__init__(side, maxTickLength=0 if grid else -4, showValues=words is not None)
        self._words, self._widest = words, widest
        self._title = ""
        self.setStyle(maxTickLevel=0, maxTextLevel=0, tickAlpha=255, tickTextOffset=5)
        self.setGrid(255 if grid else False)
        self.setZValue(-200)  # its grid lies below what is drawn

    def boundingRect(self) -> QRectF:
        """With room for the halves of the first and last numbers, which are left out otherwise."""
        across = self.orientation in ("top", "bottom")
        return QRectF(super().boundingRect().adjusted(*((-40, 0, 40, 0) if across else (0, -10, 0, 10))))

    def tickStrings(self, values: list[float], scale: float, spacing: float) -> list[str]:  # noqa: ARG002
        return [self._words(value) for value in values] if self._words is not None else []

    def set_title(self, text: str) -> None:
        self._title = text
        self.setLabel(text.replace("&", "&amp;").replace("<", "&lt;"), color=themed("muted").name())

    def dress(self, chart: QWidget) -> None:
        font = small_font(chart.font(), _TEXT_PX)
        self.setTickFont(font)
        if self._widest:
            self.setWidth(QFontMetrics(font).horizontalAdvance(self._widest) + 8)
        self.label.setFont(font)
        self.setPen(QPen(themed("border"), 1))
        self.setTextPen(QPen(themed("muted")))
        if self._title:
            self.set_title(self._title)

    def wheelEvent(self, event: QGraphicsSceneWheelEvent) -> None:
        if any(self.linkedView().mouseEnabled()):
            super().wheelEvent(event)
        else:
            event.ignore()  # the page scrolls


class Legend(pg.LegendItem):  # type: ignore[misc]
    """Above a chart, in as many columns as fit; the mouse leaves it where it is."""

    def __init__(self, chart: Chart) -> None:
        super().__init__(horSpacing=5, verSpacing=0)
        self.layout.setContentsMargins(0, 0, 0, 0)
        self._chart = chart
        self.setParentItem(chart.centralWidget)
        chart.view.sigResized.connect(lambda _view: self.fit())

    def show_items(self, items: list[tuple[pg.GraphicsObject, str]]) -> None:
        if items == [(sample.item, label.text) for sample, label in self.items]:
            return
        self.clear()
        for item, name in items:
            self.addItem(item, name)
        self.fit()

    def fit(self) -> None:
        metrics = QFontMetrics(small_font(self._chart.font(), _TEXT_PX))
        widths = [_SAMPLE_PX + metrics.horizontalAdvance(label.text) for _sample, label in self.items] or [0]
        fitting = (
            n for n in range(len(widths), 1, -1) if sum(max(widths[at::n]) for at in range(n)) <= self._chart.width()
        )
        columns = next(fitting, 1)
        self.setColumnCount(columns)
        self.layout.activate()
        self.resize(0, 0)  # as narrow as its columns
        self._chart.places.setRowFixedHeight(0, -(-len(widths) // columns) * max(22, metrics.height()) + 4)

    def dress(self) -> None:
        self.setLabelTextColor(themed("muted"))
        self.setLabelTextSize(f"{QFontInfo(small_font(self._chart.font(), _TEXT_PX)).pointSizeF():g}pt")
        self.fit()

    def hoverEvent(self, _event: object) -> None:
        """Does not take the mouse's drags."""

    def mouseDragEvent(self, event: pg.GraphicsScene.mouseEvents.MouseDragEvent) -> None:
        event.ignore()


class Chart(_GraphicsView):
    """One view with axes beside it.

    The view is still unless it enables the mouse: a wheel over it then scrolls the page.
    """

    def __init__(self, parent: QWidget | None = None, *, view: pg.ViewBox | None = None, **axes: Axis) -> None:
        super().__init__(parent)
        self.setProperty("chart", True)
        self.axes = axes
        self.view = view or pg.ViewBox(enableMenu=False, enableMouse=False, defaultPadding=0)
        self.view.disableAutoRange()
        pg.GraphicsView.setCentralItem(self, pg.GraphicsWidget())
        self.places = QGraphicsGridLayout(self.centralWidget)
        self.places.setContentsMargins(0, 0, 0, 0)
        self.places.setSpacing(0)
        self.places.addItem(self.view, 1, 1)
        for side, axis in axes.items():
            axis.linkToView(self.view)
            self.places.addItem(axis, *_PLACES[side])

    centralWidget: Any
    sceneObj: Any
    _is_dressed = False

    def dress(self) -> None:
        """Takes on the theme's colours and the font: what makes a chart calls it, and then it follows their changes."""
        self._is_dressed = True
        self.setBackgroundBrush(themed("surface"))
        for axis in self.axes.values():
            axis.dress(self)

    def write_picture(self, path: Path) -> bool:
        """Writes it as PNG, or as SVG if the name ends in `.svg`; False if that fails."""
        if path.suffix == ".svg":
            return self._write_drawing(path)
        exporter = pyqtgraph.exporters.ImageExporter(self.centralWidget)
        exporter.parameters()["width"] = round(self.width() * max(2.0, self.devicePixelRatioF()))
        return bool(exporter.export(str(path)))

    def _write_drawing(self, path: Path) -> bool:
        """pyqtgraph's own exporter fails at every closed path since Qt writes a `Z` for those; Qt's clips as well."""
        try:
            path.touch()
        except OSError:
            return False
        whole = QRect(QPoint(0, 0), self.viewport().size())
        generator = QSvgGenerator()
        generator.setFileName(str(path))
        generator.setResolution(self.logicalDpiX())  # that of what the axes have recorded
        generator.setSize(whole.size())
        generator.setViewBox(whole)
        generator.setTitle("Switchyard")
        painter = QPainter(generator)
        painter.fillRect(whole, self.backgroundBrush())
        self.scene().render(painter, whole, self.sceneRect())
        painter.end()
        return path.stat().st_size > 0

    def pen(self, colour: QColor, width: float = 1.0, style: Qt.PenStyle = Qt.PenStyle.SolidLine) -> QPen:
        """Equally wide at every zoom, and on every screen: Qt takes such a width for the screen's own pixels."""
        result = QPen(colour, width * self.devicePixelRatioF(), style)
        result.setCosmetic(True)
        return result

    def hatched(self, colour: QColor, pattern: Qt.BrushStyle = Qt.BrushStyle.BDiagPattern) -> QBrush:
        """A hatched brush for items in the view's coordinates, which would otherwise stretch it."""
        brush = QBrush(colour, pattern)
        to_pixels = self.view.childTransform()
        brush.setTransform(QTransform.fromScale(1 / (to_pixels.m11() or 1.0), 1 / (to_pixels.m22() or 1.0)))
        return brush

    def text_at(self, at: QPointF) -> str:  # noqa: ARG002
        return str(self.toolTip())

    def viewportEvent(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.text_at(QPointF(event.pos())), self)  # none hides the last
            return True
        return bool(super().viewportEvent(event))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        # pyqtgraph counts the frame in, and so what is at the edge was cut off.
        inside = QRectF(self.viewport().rect())
        if self.autoPixelRange and inside != self.range:
            pg.GraphicsView.setRange(self, inside, padding=0, disableAutoPixel=False)

    autoPixelRange: bool
    range: QRectF

    def event(self, event: QEvent) -> bool:
        handled = bool(super().event(event))
        if event.type() in (QEvent.Type.StyleChange, QEvent.Type.DevicePixelRatioChange) and self._is_dressed:
            self.dress()
        return handled

    def close(self) -> bool:
        return QGraphicsView.close(self)  # pyqtgraph's takes the view apart, and the next style sheet crashes

    def mousePressEvent(self, event: QMouseEvent) -> None:
        super().mousePressEvent(event)
        self._take(event)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        self._take(event)

    def _take(self, event: QMouseEvent) -> None:
        """What the mouse can work on keeps its events: pyqtgraph would pass them on to what lies below as well."""
        if self.focusPolicy() & Qt.FocusPolicy.ClickFocus:
            event.accept()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        event.ignore()  # the view's own keys are not ours


def hit_colour() -> QColor:
    """Of lines about hits; the theme's own is too light for a line on white."""
    return themed("hit") if colours().is_dark else themed("hit").darker(150)
