"""A machine's roofline for a model's experts: attainable speed by operational intensity, with measured points.

MoE-Lightning's Hierarchical Roofline Model (its section 3), on logarithmic axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyqtgraph as pg
from PySide6.QtCore import QPointF, QSize, Qt
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import ColourName, themed
from app.widgets.chart import Axis, Chart, Legend
from app.widgets.chip import small_font
from app.widgets.quantities import arithmetic, figures, rate
from app.widgets.timeline.navigator import faded
from engine.planner.plan_parts import RooflinePicture, RooflinePoint

_POINT_PX, _NEAR_PX = 10, 18


@dataclass(frozen=True, slots=True)
class Roof:
    name: str
    flops: float
    bytes_per_s: float
    colour: ColourName
    dashed: bool = False

    def at(self, intensity: float) -> float:
        return min(self.flops, self.bytes_per_s * intensity)


class RooflinePlot(Chart):
    """Roofs and points are labelled, so that colour is never the only cue."""

    def __init__(self, parent: QWidget | None = None) -> None:
        speeds = Axis("left", lambda power: arithmetic(10**power), grid=True, widest="888 GFLOP/s")
        intensities = Axis("bottom", lambda power: f"{10**power:g}", grid=True)
        super().__init__(parent, left=speeds, bottom=intensities)
        intensities.set_title(self.tr("operations per byte →"))
        for axis in (speeds, intensities):
            axis.setTickSpacing(1, 1)  # powers of ten
        self._picture: RooflinePicture | None = None
        self._legend = Legend(self)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(self.tr("Roofline"))
        self.dress()

    def show_picture(self, picture: RooflinePicture | None) -> None:
        self._picture = picture
        self.setAccessibleDescription(self.spoken())
        self._draw()

    def spoken(self) -> str:
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
        knees = [roof.flops / roof.bytes_per_s for roof in roofs]
        xs = [point.intensity for point in picture.points if 0 < point.intensity < math.inf] + knees
        left, right = math.log10(min(xs)) - 0.5, math.log10(max(xs)) + 0.45
        low = math.log10(min(roof.at(10**left) for roof in roofs))
        return left, right, low, math.log10(max(roof.flops for roof in roofs)) + 0.12

    def dress(self) -> None:
        super().dress()
        self._legend.dress()
        self._draw()

    def _draw(self) -> None:
        picture = self._picture
        roofs = self._roofs(picture) if picture is not None else []
        self.view.clear()
        self.centralWidget.setVisible(bool(roofs))
        if picture is None or not roofs:
            return
        left, right, low, high = self._ranges(picture, roofs)
        self.view.setRange(xRange=(left, right), yRange=(low, high), padding=0)
        named = []
        for roof in roofs:
            xs = [left, math.log10(roof.flops / roof.bytes_per_s), right]
            style = Qt.PenStyle.DashLine if roof.dashed else Qt.PenStyle.SolidLine
            line = pg.PlotCurveItem(
                xs, [math.log10(roof.at(10**x)) for x in xs], pen=self.pen(themed(roof.colour), 2.4, style)
            )
            self.view.addItem(line, ignoreBounds=True)
            named.append((line, f"{roof.name} · {rate(roof.bytes_per_s)}"))
        self._legend.show_items(named)
        for point in picture.points:
            if 0 < point.intensity < math.inf and point.flops > 0:
                self._draw_point(point, math.log10(point.intensity), math.log10(point.flops), right)

    def _draw_point(self, point: RooflinePoint, x: float, y: float, right: float) -> None:
        colour: ColourName = (
            "cpu" if point.bound_by.startswith("CPU") else "pcie" if point.bound_by == "link" else "gpu"
        )
        down = pg.PlotCurveItem(
            [x, x], [y, self.view.viewRange()[1][0]], pen=self.pen(themed("muted"), 1, Qt.PenStyle.DotLine)
        )
        spot = pg.ScatterPlotItem([x], [y], size=_POINT_PX, pen=self.pen(themed("text"), 1.5), brush=themed(colour))
        is_far_right = x > right - 0.25 * (right - self.view.viewRange()[0][0])
        name = pg.TextItem(self._point_name(point), themed("text"), anchor=(1.1, 0.9) if is_far_right else (-0.1, -0.2))
        name.fill = pg.mkBrush(faded(themed("surface"), 200))
        name.setFont(small_font(self.font(), 11.5))
        name.setPos(x, y)
        for item in (down, spot, name):
            self.view.addItem(item, ignoreBounds=True)

    def text_at(self, at: QPointF) -> str:
        for point in self._picture.points if self._picture is not None else ():
            if 0 < point.intensity < math.inf and point.flops > 0:
                place = self.view.mapViewToScene(QPointF(math.log10(point.intensity), math.log10(point.flops)))
                if (place - at).manhattanLength() < _NEAR_PX:
                    return self._point_words(point)
        return self.spoken()
