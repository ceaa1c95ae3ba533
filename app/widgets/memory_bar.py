"""Bars of what a memory is used for, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPainterPath, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import ColourName, themed
from app.widgets.quantities import count

if TYPE_CHECKING:  # it imports numpy, and the window has a bar when it opens
    from engine.planner.plan_parts import TierBytes

translate = QCoreApplication.translate

HEIGHT_PX = 8
RADIUS_PX = 2.5
_GIB = 2**30
_FAINT_ALPHA = 110


@dataclass(frozen=True, slots=True)
class BarPart:
    """One part: its name for the legend, its amount, its colour, and whether it is hatched, downwards if `falls`."""

    name: str
    amount: int
    colour: ColourName
    hatched: bool = False
    falls: bool = False

    @property
    def pattern(self) -> Qt.BrushStyle:
        if not self.hatched:
            return Qt.BrushStyle.SolidPattern
        return Qt.BrushStyle.FDiagPattern if self.falls else Qt.BrushStyle.BDiagPattern

    @property
    def ground(self) -> QColor:
        """The colour between its hatching."""
        result = themed(self.colour)
        if self.hatched:
            result.setAlpha(_FAINT_ALPHA)
        return result


@dataclass(frozen=True, slots=True)
class TierBar:
    """A tier: its parts, and its size, 0 if unknown; `unit` is what it calls a GB: memories count in powers of 1024."""

    name: str
    parts: tuple[BarPart, ...]
    total: int
    unit: int = _GIB

    @property
    def used(self) -> int:
        return sum(part.amount for part in self.parts)


def memory_parts(tier: TierBytes, slots: int = 0) -> tuple[BarPart, ...]:
    """What a memory is planned for; `slots` is how many experts have a place in it, 0 to leave that out."""
    experts = (
        translate("PlanBars", "experts, {0} slots").format(count(slots)) if slots else translate("PlanBars", "experts")
    )
    return (
        BarPart(translate("PlanBars", "model"), tier.weights, "gpu"),
        BarPart(experts, tier.experts, "hit"),
        BarPart(translate("PlanBars", "loading buffers"), tier.staging, "pcie"),
        BarPart(translate("PlanBars", "chat memory"), tier.kv, "disk"),
        BarPart(translate("PlanBars", "working memory"), tier.activations, "cpu"),
        BarPart(translate("PlanBars", "reading pictures"), tier.pictures, "accent"),
        BarPart(translate("PlanBars", "safety margin"), tier.headroom, "faint", hatched=True),
        BarPart(translate("PlanBars", "other programs"), tier.other_programs, "idle", hatched=True),
    )


class MemoryBar(QWidget):
    """Parts side by side, in proportion to `total`; the rest is free."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._parts: tuple[BarPart, ...] = ()
        self._total = 0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def sizeHint(self) -> QSize:
        return QSize(120, HEIGHT_PX)

    def show_parts(self, parts: tuple[BarPart, ...], total: int) -> None:
        """Parts beyond `total` are cut off."""
        if (parts, total) != (self._parts, self._total):
            self._parts, self._total = parts, total
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        draw_bar(painter, self._parts, self._total, QRectF(self.rect()))
        painter.end()


def draw_bar(painter: QPainter, parts: tuple[BarPart, ...], total: int, bar: QRectF) -> None:
    """Parts side by side in `bar`; the rest of it is free."""
    outline = QPainterPath()
    outline.addRoundedRect(bar, RADIUS_PX, RADIUS_PX)
    painter.save()
    painter.setClipPath(outline)
    painter.fillRect(bar, themed("border"))
    left = bar.left()
    for part in parts:
        if part.amount > 0 and total:
            width = max(2.0, bar.width() * part.amount / total)  # small parts stay visible
            area = QRectF(left, bar.top(), width, bar.height())
            painter.fillRect(area, part.ground)
            if part.hatched:
                painter.fillRect(area, QBrush(themed(part.colour), part.pattern))
            left += width
            if left < bar.right():
                painter.setPen(QPen(themed("surface"), 1))
                painter.drawLine(QPointF(left, bar.top()), QPointF(left, bar.bottom()))
    painter.restore()
