"""The machine as a diagram: boxes for cards, RAM, CPU and disk, and links as wide as their bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFocusEvent, QFont, QFontMetricsF, QHelpEvent, QKeyEvent, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.theme import tabular, themed
from app.widgets.chip import small_font

Part = Literal["gpu", "cpu", "ram", "disk"]
PARTS: tuple[Part, ...] = ("gpu", "cpu", "ram", "disk")
_PAD = 14.0
_RADIUS = 10.0
_WIDEST, _NARROWEST = 26.0, 3.0
_MOST_LINES, _FEWEST_LINES = 4, 2
_LONGEST_LABEL = "about 0.50 GB/s"


@dataclass(frozen=True, slots=True)
class BoxLine:
    text: str
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the machine.

    Attributes:
        lines: at most four are drawn.
        is_there: a missing part is drawn as a faint outline.
        count: of the same kind; more than one are drawn as a stack.
    """

    part: Part
    title: str
    lines: tuple[BoxLine, ...]
    is_there: bool = True
    count: int = 1

    @property
    def spoken(self) -> str:
        return f"{self.title}: " + "; ".join(
            f"{one.text} ({one.origin})" if one.origin else one.text for one in self.lines
        )


@dataclass(frozen=True, slots=True)
class PictureLink:
    """A link between a part and the RAM.

    Attributes:
        bytes_per_s: sets its width.
        labels: drawn beside it.
        is_measured: otherwise it is drawn hollow.
    """

    part: Part
    bytes_per_s: float
    labels: tuple[BoxLine, ...]
    is_measured: bool

    @property
    def spoken(self) -> str:
        return "; ".join(f"{one.text} ({one.origin})" if one.origin else one.text for one in self.labels)


class MachinePicture(QWidget):
    """Arrow keys move between boxes; each shows its numbers' sources, also on hover."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._boxes: dict[Part, Box] = {}
        self._links: dict[Part, PictureLink] = {}
        self._at_work: Part | None = None
        self._current: Part | None = None
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setMouseTracking(True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(self.tr("Picture of this machine"))

    def show_machine(self, boxes: tuple[Box, ...], links: tuple[PictureLink, ...]) -> None:
        self._boxes = {box.part: box for box in boxes}
        self._links = {link.part: link for link in links}
        self.setFixedHeight(self._height())
        said = [box.spoken for box in boxes] + [link.spoken for link in links]
        self.setAccessibleDescription("\n".join(said))
        self.update()

    def show_at_work(self, part: Part | None) -> None:
        if part != self._at_work:
            self._at_work = part
            self.update()

    def spoken_at(self, point: QPointF) -> str:
        for part, area in self._areas().items():
            if part in self._boxes and area.contains(point):
                return self._explained(part)
        for part, link in self._links.items():
            if self._label_area(part).contains(point) or self._link_area(part, link).contains(point):
                return "\n".join(f"{one.text}: {one.origin}" if one.origin else one.text for one in link.labels)
        return ""

    def sizeHint(self) -> QSize:
        return QSize(600, self._height())

    def minimumSizeHint(self) -> QSize:
        return QSize(360, self._height())

    # --- geometry ---------------------------------------------------------------------------------

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self.setFixedHeight(self._height())

    def _text_height(self) -> float:
        return QFontMetricsF(self._small()).height() + 2

    def _small(self) -> QFont:
        return small_font(self.font(), 12.5)

    def _box_height(self, *parts: Part) -> float:
        lines = max(
            (min(_MOST_LINES, len(self._boxes[part].lines)) for part in parts if part in self._boxes), default=1
        )
        return 2 * 12 + QFontMetricsF(self.font()).height() + 5 + max(_FEWEST_LINES, lines) * self._text_height()

    def _gap(self) -> float:
        return 2 * self._text_height() + 24

    def _height(self) -> int:
        return round(self._box_height("gpu", "cpu") + self._box_height("ram", "disk") + self._gap() + 6)

    def _areas(self) -> dict[Part, QRectF]:
        width, top = float(self.width()), 3.0
        upper, lower = self._box_height("gpu", "cpu"), self._box_height("ram", "disk")
        low = top + upper + self._gap()
        side, disk = 0.475 * width - 3, 0.25 * width
        middle = QFontMetricsF(self._small()).horizontalAdvance(_LONGEST_LABEL) + 12
        return {
            "gpu": QRectF(3, top, side, upper),
            "cpu": QRectF(width - side - 3, top, side, upper),
            "ram": QRectF(3, low, width - disk - middle - 6, lower),
            "disk": QRectF(width - disk - 3, low, disk, lower),
        }

    def _link_line(self, part: Part) -> tuple[QPointF, QPointF]:
        areas = self._areas()
        ram = areas["ram"]
        if part == "disk":
            y = ram.top() + 0.62 * ram.height()
            return QPointF(ram.right(), y), QPointF(areas["disk"].left(), y)
        if part == "gpu":
            x = areas["gpu"].left() + 0.3 * areas["gpu"].width()
        else:
            x = (areas["cpu"].left() + ram.right()) / 2  # the middle of their overlap
        return QPointF(x, areas[part].bottom()), QPointF(x, ram.top())

    def _link_width(self, link: PictureLink) -> float:
        most = max((one.bytes_per_s for one in self._links.values()), default=0.0)
        # Square root: on a linear scale a disk's link would be too thin beside RAM's.
        return max(_NARROWEST, _WIDEST * (link.bytes_per_s / most) ** 0.5) if most else _NARROWEST

    def _link_area(self, part: Part, link: PictureLink) -> QRectF:
        start, end = self._link_line(part)
        half = max(8.0, self._link_width(link) / 2)
        return QRectF(start, end).normalized().adjusted(-half, -half, half, half)

    def _label_area(self, part: Part) -> QRectF:
        start, end = self._link_line(part)
        if part == "disk":
            high = 2 * self._text_height()
            return QRectF(start.x() + 2, start.y() - _WIDEST / 2 - high, end.x() - start.x() - 4, high)
        left = start.x() + _WIDEST / 2 + 10
        right = self._link_line("cpu")[0].x() - _WIDEST / 2 - 8 if part == "gpu" else float(self.width())
        return QRectF(left, start.y() + 9, max(0.0, right - left), end.y() - start.y() - 18)

    # --- drawing ----------------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        for part, link in self._links.items():
            self._draw_link(painter, part, link)
        areas = self._areas()
        for part, box in self._boxes.items():
            self._draw_box(painter, areas[part], box)
        painter.end()

    def _colour(self, part: Part) -> QColor:
        return themed("pcie" if part == "ram" else part)

    def _draw_box(self, painter: QPainter, area: QRectF, box: Box) -> None:
        colour = self._colour(box.part)
        pen = QPen(colour, 3.0 if box.part == self._at_work else 1.6)
        if not box.is_there:
            pen = QPen(themed("faint"), 1.4, Qt.PenStyle.DashLine)
        for behind in range(min(box.count, 3) - 1, 0, -1):
            painter.setPen(QPen(colour, 1.2))
            painter.setBrush(themed("surface"))
            painter.drawRoundedRect(
                area.translated(5.0 * behind, 0).adjusted(0, 5.0 * behind, 0, -5.0 * behind), _RADIUS, _RADIUS
            )
        painter.setPen(pen)
        painter.setBrush(themed("surface"))
        painter.drawRoundedRect(area, _RADIUS, _RADIUS)
        if self.hasFocus() and box.part == self._current:
            painter.setPen(QPen(themed("accent"), 2))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(area.adjusted(4, 4, -4, -4), _RADIUS - 3, _RADIUS - 3)
        bold = tabular(self.font())
        bold.setWeight(bold.Weight.DemiBold)
        painter.setFont(bold)
        painter.setPen(themed("text"))
        inner = area.adjusted(_PAD, 11, -_PAD, -8)
        metrics = QFontMetricsF(bold)
        painter.drawText(
            inner, Qt.AlignmentFlag.AlignTop, metrics.elidedText(box.title, Qt.TextElideMode.ElideRight, inner.width())
        )
        painter.setFont(self._small())
        painter.setPen(themed("muted"))
        y = inner.top() + metrics.height() + 5
        small = QFontMetricsF(self._small())
        for line in box.lines[:_MOST_LINES]:
            text = small.elidedText(line.text, Qt.TextElideMode.ElideRight, inner.width())
            painter.drawText(
                QRectF(inner.left(), y, inner.width(), self._text_height()), Qt.AlignmentFlag.AlignTop, text
            )
            y += self._text_height()

    def _draw_link(self, painter: QPainter, part: Part, link: PictureLink) -> None:
        colour = self._colour("ram" if part == "gpu" else part)
        start, end = self._link_line(part)
        half = self._link_width(link) / 2
        across = QPointF(half, 0) if part != "disk" else QPointF(0, half)
        shape = QRectF(start - across, end + across).normalized()
        soft = QColor(colour)
        soft.setAlpha(150 if link.is_measured else 40)
        painter.setBrush(soft)
        painter.setPen(Qt.PenStyle.NoPen if link.is_measured else QPen(colour, 1.2, Qt.PenStyle.DashLine))
        painter.drawRect(shape)
        painter.setFont(self._small())
        metrics = QFontMetricsF(self._small())
        area = self._label_area(part)
        height = self._text_height()
        y = (
            area.bottom() - height * len(link.labels)
            if part == "disk"
            else area.center().y() - height * len(link.labels) / 2
        )
        for number, label in enumerate(link.labels):
            painter.setPen(themed("text" if number == 0 else "muted"))
            align = Qt.AlignmentFlag.AlignHCenter if part == "disk" else Qt.AlignmentFlag.AlignLeft
            text = metrics.elidedText(label.text, Qt.TextElideMode.ElideRight, area.width())
            painter.drawText(QRectF(area.left(), y, area.width(), height), align | Qt.AlignmentFlag.AlignVCenter, text)
            y += height

    # --- hover and keys ---------------------------------------------------------------------------

    def _explained(self, part: Part) -> str:
        box = self._boxes[part]
        return "\n".join([box.title, *(f"{one.text}: {one.origin}" if one.origin else one.text for one in box.lines)])

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self.spoken_at(QPointF(event.pos())), self)
            return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        keys = {Qt.Key.Key_Right: 1, Qt.Key.Key_Down: 1, Qt.Key.Key_Left: -1, Qt.Key.Key_Up: -1}
        step = keys.get(Qt.Key(event.key()))
        there = [part for part in PARTS if part in self._boxes]
        if step is None or not there:
            super().keyPressEvent(event)
            return
        at = there.index(self._current) if self._current in there else -1 if step > 0 else 0
        self._current = there[(at + step) % len(there)]
        corner = self._areas()[self._current].bottomLeft()
        self.setAccessibleName(self._boxes[self._current].spoken)
        QToolTip.showText(self.mapToGlobal(corner.toPoint()), self._explained(self._current), self)
        self.update()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self._current = self._current or next((part for part in PARTS if part in self._boxes), None)
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.setAccessibleName(self.tr("Picture of this machine"))
        self.update()
