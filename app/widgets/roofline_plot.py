"""A machine's roofline for a model's experts: attainable speed by operational intensity, with measured points.

MoE-Lightning's Hierarchical Roofline Model (its section 3), on logarithmic axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QFont, QFontMetricsF, QHelpEvent, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.theme import ColourName, themed
from app.widgets.quantities import arithmetic, figures, rate
from app.widgets.small_font import small_font
from engine.planner.plan_parts import RooflinePicture, RooflinePoint

_LEFT, _TOP, _RIGHT = 12.0, 26.0, 14.0
_POINT_PX = 5.0


@dataclass(frozen=True, slots=True)
class Roof:
    """A roof: a slope set by a bandwidth, up to the peak compute."""

    name: str
    flops: float
    bytes_per_s: float
    colour: ColourName
    dashed: bool = False

    def at(self, intensity: float) -> float:
        """Attainable operations per second at this many operations per byte."""
        return min(self.flops, self.bytes_per_s * intensity)


class RooflinePlot(QWidget):
    """Roofs and points are labelled, so that colour is never the only cue."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._picture: RooflinePicture | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(self.tr("Roofline"))

    def show_picture(self, picture: RooflinePicture | None) -> None:
        """Draws this; None clears the plot."""
        self._picture = picture
        self.setAccessibleDescription(self.spoken())
        self.update()

    def spoken(self) -> str:
        """The plot in words."""
        if self._picture is None:
            return ""
        roofs = [
            self.tr("{0}: {1}, up to {2}").format(roof.name, rate(roof.bytes_per_s), arithmetic(roof.flops))
            for roof in self._roofs(self._picture)
        ]
        return "\n".join([*roofs, *(self._point_words(point) for point in self._picture.points)])

    def sizeHint(self) -> QSize:
        return QSize(320, 240)

    def minimumSizeHint(self) -> QSize:
        return QSize(260, 200)

    # --- what is drawn ----------------------------------------------------------------------------

    def _roofs(self, picture: RooflinePicture) -> list[Roof]:
        roofs = []
        if picture.gpu_flops > 0 and picture.gpu_bytes_per_s > 0:
            roofs.append(Roof(self.tr("GPU"), picture.gpu_flops, picture.gpu_bytes_per_s, "gpu"))
            if picture.link_bytes_per_s > 0:
                name = self.tr("GPU over the link")
                roofs.append(Roof(name, picture.gpu_flops, picture.link_bytes_per_s, "pcie", dashed=True))
        if picture.cpu_flops > 0 and picture.cpu_bytes_per_s > 0:
            roofs.append(Roof(self.tr("CPU"), picture.cpu_flops, picture.cpu_bytes_per_s, "cpu"))
        return roofs

    def _point_words(self, point: RooflinePoint) -> str:
        bounds = {
            "link": self.tr("limited by the link to the card"),
            "GPU memory": self.tr("limited by the card's memory"),
            "GPU arithmetic": self.tr("limited by GPU compute"),
            "CPU memory": self.tr("limited by RAM"),
            "CPU arithmetic": self.tr("limited by CPU compute"),
        }
        return self.tr("{0}: {1} operations per byte, {2}, {3}").format(
            self._point_name(point),
            figures(point.intensity),
            arithmetic(point.flops),
            bounds.get(point.bound_by, point.bound_by),
        )

    def _point_name(self, point: RooflinePoint) -> str:
        names = {"decode": self.tr("decode"), "prefill": self.tr("prefill"), "batch": self.tr("batch")}
        return names.get(point.name, point.name)

    def _ranges(self, picture: RooflinePicture, roofs: list[Roof]) -> tuple[float, float, float, float]:
        """Logarithms of the lowest and highest intensity and speed shown."""
        knees = [roof.flops / roof.bytes_per_s for roof in roofs]
        xs = [point.intensity for point in picture.points if 0 < point.intensity < math.inf] + knees
        left, right = math.log10(min(xs)) - 0.5, math.log10(max(xs)) + 0.45
        low = math.log10(min(roof.at(10**left) for roof in roofs))
        return left, right, low, math.log10(max(roof.flops for roof in roofs)) + 0.12

    def _plot_area(self) -> QRectF:
        return QRectF(self.rect()).adjusted(_LEFT, _TOP, -_RIGHT, -2 * QFontMetricsF(self._small()).height() - 8)

    def _small(self) -> QFont:
        return small_font(self.font(), 11.5)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        picture = self._picture
        roofs = self._roofs(picture) if picture is not None else []
        if picture is None or not roofs:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._small())
        area, ranges = self._plot_area(), self._ranges(picture, roofs)
        self._draw_axes(painter, area, ranges)
        taken: list[QRectF] = []
        for roof in roofs:
            self._draw_roof(painter, area, ranges, roof)
        self._draw_points(painter, area, ranges, picture, taken)
        for roof in roofs:
            self._label_roof(painter, area, ranges, roof, taken)
            self._label_top(painter, area, ranges, roof, taken)
        painter.end()

    def _at(self, area: QRectF, ranges: tuple[float, float, float, float], x: float, y: float) -> QPointF:
        left, right, low, high = ranges
        across = (math.log10(max(x, 1e-12)) - left) / max(right - left, 1e-9)
        up = (math.log10(max(y, 1e-12)) - low) / max(high - low, 1e-9)
        return QPointF(area.left() + across * area.width(), area.bottom() - up * area.height())

    def _draw_axes(self, painter: QPainter, area: QRectF, ranges: tuple[float, float, float, float]) -> None:
        metrics = QFontMetricsF(painter.font())
        painter.setPen(QPen(themed("border"), 1))
        painter.drawLine(area.bottomLeft(), area.bottomRight())
        left, right, _low, _high = ranges
        for power in range(math.ceil(left), math.floor(right) + 1):
            x = self._at(area, ranges, 10.0**power, 1).x()
            painter.setPen(QPen(themed("border"), 1))
            painter.drawLine(QPointF(x, area.top()), QPointF(x, area.bottom()))
            painter.setPen(themed("muted"))
            box = QRectF(x - 30, area.bottom() + 4, 60, metrics.height())
            painter.drawText(box, Qt.AlignmentFlag.AlignHCenter, f"{10.0**power:g}")
        painter.setPen(themed("muted"))
        line = QRectF(area.left(), area.bottom() + 4 + metrics.height(), area.width(), metrics.height())
        painter.drawText(line, Qt.AlignmentFlag.AlignRight, self._axis_name())
        painter.drawText(QRectF(area.left(), 2, area.width(), metrics.height()), 0, self.tr("operations/s"))

    def _axis_name(self) -> str:
        return self.tr("operations per byte →")

    def _draw_roof(
        self, painter: QPainter, area: QRectF, ranges: tuple[float, float, float, float], roof: Roof
    ) -> None:
        knee = roof.flops / roof.bytes_per_s
        xs = [10 ** ranges[0], knee, 10 ** ranges[1]]
        line = QPolygonF([self._at(area, ranges, x, roof.at(x)) for x in xs])
        pen = QPen(themed(roof.colour), 2.4, Qt.PenStyle.DashLine if roof.dashed else Qt.PenStyle.SolidLine)
        pen.setJoinStyle(Qt.PenJoinStyle.RoundJoin)
        painter.save()
        painter.setClipRect(area.adjusted(0, -4, 0, 2))
        painter.setPen(pen)
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawPolyline(line)
        painter.restore()

    def _label_roof(
        self,
        painter: QPainter,
        area: QRectF,
        ranges: tuple[float, float, float, float],
        roof: Roof,
        taken: list[QRectF],
    ) -> None:
        """Above the slope if there is room, trying its middle first."""
        text, metrics = f"{roof.name} · {rate(roof.bytes_per_s)}", QFontMetricsF(painter.font())
        width, height = metrics.horizontalAdvance(text) + 8, metrics.height()
        knee = math.log10(roof.flops / roof.bytes_per_s)
        flat = (min(max(knee, ranges[0]), ranges[1]) + ranges[1]) / 2
        for share in (0.55, 0.35, 0.75, 0.15, 0.95):
            x = ranges[0] + share * (min(knee, ranges[1]) - ranges[0])
            at = self._at(area, ranges, 10**x, roof.at(10**x))
            for box in (
                QRectF(at.x() + 12, at.y() - 2, width, height),
                QRectF(at.x() - width - 8, at.y() - height - 4, width, height),
            ):
                if self._place(painter, area, box, text, roof.colour, taken):
                    return
        at = self._at(area, ranges, 10**flat, roof.flops)
        box = QRectF(at.x() - width / 2, at.y() + 4, width, height)
        self._place(painter, area, box, text, roof.colour, taken)

    def _label_top(
        self,
        painter: QPainter,
        area: QRectF,
        ranges: tuple[float, float, float, float],
        roof: Roof,
        taken: list[QRectF],
    ) -> None:
        """The peak compute, below the flat part or above it; omitted if there is no room."""
        if roof.dashed:  # the same as the card's own roof
            return
        text, metrics = arithmetic(roof.flops), QFontMetricsF(painter.font())
        width, end = metrics.horizontalAdvance(text) + 12, self._at(area, ranges, 10 ** ranges[1], roof.flops)
        for y in (end.y() + 5, end.y() - metrics.height() - 5):
            for x in (end.x() - width, end.x() - 2 * width):
                if self._place(painter, area, QRectF(x, y, width, metrics.height()), text, roof.colour, taken):
                    return

    def _place(
        self, painter: QPainter, area: QRectF, box: QRectF, text: str, colour: ColourName, taken: list[QRectF]
    ) -> bool:
        whole = area.adjusted(0, -_TOP + 18, _RIGHT, 0)
        if not whole.contains(box) or any(box.intersects(other) for other in taken):
            return False
        taken.append(box)
        back = themed("surface")
        back.setAlpha(215)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(back)
        painter.drawRoundedRect(box, 3, 3)
        painter.setBrush(themed(colour))
        painter.drawEllipse(QPointF(box.left() + 3, box.center().y()), 2.5, 2.5)
        painter.setPen(themed("text"))
        painter.drawText(box.adjusted(9, 0, 8, 0), Qt.AlignmentFlag.AlignVCenter, text)
        return True

    def _draw_points(
        self,
        painter: QPainter,
        area: QRectF,
        ranges: tuple[float, float, float, float],
        picture: RooflinePicture,
        taken: list[QRectF],
    ) -> None:
        metrics = QFontMetricsF(painter.font())
        for point in picture.points:
            if not 0 < point.intensity < math.inf:
                continue
            at = self._at(area, ranges, point.intensity, point.flops)
            painter.setPen(QPen(themed("muted"), 1, Qt.PenStyle.DotLine))
            painter.drawLine(at, QPointF(at.x(), area.bottom()))
            colour = themed(
                "cpu" if point.bound_by.startswith("CPU") else "pcie" if point.bound_by == "link" else "gpu"
            )
            painter.setPen(QPen(themed("text"), 1.5))
            painter.setBrush(colour)
            painter.drawEllipse(at, _POINT_PX, _POINT_PX)
            taken.append(QRectF(at.x() - 7, at.y() - 7, 14, 14))
            name = self._point_name(point)
            width = metrics.horizontalAdvance(name) + 6
            boxes = [
                QRectF(at.x() + 9, at.y() + 5, width, metrics.height()),
                QRectF(at.x() - width - 9, at.y() - metrics.height() - 5, width, metrics.height()),
                QRectF(at.x() - width - 9, at.y() + 5, width, metrics.height()),
                QRectF(at.x() - width / 2, at.y() + 24, width, metrics.height()),
            ]
            free = [box for box in boxes if area.contains(box) and not any(box.intersects(other) for other in taken)]
            box = free[0] if free else boxes[0]
            taken.append(box)
            painter.setPen(themed("text"))
            painter.drawText(box.adjusted(3, 0, 10, 0), Qt.AlignmentFlag.AlignVCenter, name)

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            QToolTip.showText(event.globalPos(), self._words_at(QPointF(event.pos())), self)
            return True
        return super().event(event)

    def _words_at(self, mouse: QPointF) -> str:
        picture = self._picture
        roofs = self._roofs(picture) if picture is not None else []
        if picture is None or not roofs:
            return ""
        area, ranges = self._plot_area(), self._ranges(picture, roofs)
        for point in picture.points:
            if 0 < point.intensity < math.inf:
                away = self._at(area, ranges, point.intensity, point.flops) - mouse
                if math.hypot(away.x(), away.y()) < 14:
                    return self._point_words(point)
        return self.spoken()
