"""Bars of what a memory is used for, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPainterPath, QPaintEvent, QPen
from PySide6.QtWidgets import QGridLayout, QLabel, QSizePolicy, QWidget

from app.theme import ColourName, themed, use_tabular_figures
from app.widgets.quantities import count, memory, used_of
from app.widgets.scaffold import STRETCH, hbox, text_label, vbox

if TYPE_CHECKING:
    from engine.planner.plan_parts import TierBytes

translate = QCoreApplication.translate


class MemoryGauge(QWidget):
    def __init__(self, name: str, parent: QWidget) -> None:
        super().__init__(parent)
        self._name = name
        label = text_label(self, name, role="caption")
        self._amount = text_label(self, role="caption", tabular=True)
        self._bar = MemoryBar(self)
        vbox(hbox(label, STRETCH, self._amount, gap=-1), self._bar, into=self, gap=4)

    def set_narrow(self, narrow: bool) -> None:
        self._amount.setVisible(not narrow)

    def show_parts(self, parts: tuple[BarPart, ...], used: int, total: int, *, source: str) -> None:
        """`source` says where the figures come from."""
        self._amount.setText(used_of(used, total))
        self._bar.show_parts(parts, total)
        spoken = ", ".join(f"{part.name} {memory(part.amount)}" for part in parts)
        self.setAccessibleName(f"{self._name} {used_of(used, total)}: {spoken}")
        self.setToolTip(f"{self.accessibleName()}\n{source}")


class MemoryLegend(QWidget):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(6)
        self._grid.setVerticalSpacing(2)
        self._grid.setColumnStretch(1, 1)
        self._rows: list[tuple[MemoryBar, QLabel, QLabel]] = []

    def show_parts(self, parts: tuple[BarPart, ...]) -> None:
        while len(self._rows) < len(parts):
            self._add_row()
        for row, widgets in enumerate(self._rows):
            for widget in widgets:
                widget.setVisible(row < len(parts))
        for part, (swatch, name, amount) in zip(parts, self._rows, strict=False):
            swatch.show_parts((replace(part, amount=1),), 1)
            name.setText(part.name)
            amount.setText(memory(part.amount))

    def _add_row(self) -> None:
        swatch, name, amount = MemoryBar(self), QLabel(self), QLabel(self)
        swatch.setFixedSize(QSize(10, 8))
        row = len(self._rows)
        for label in (name, amount):
            label.setProperty("role", "caption")
        use_tabular_figures(amount)
        self._grid.addWidget(swatch, row, 0)
        self._grid.addWidget(name, row, 1)
        self._grid.addWidget(amount, row, 2, Qt.AlignmentFlag.AlignRight)
        self._rows.append((swatch, name, amount))


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
        if (parts, total) != (self._parts, self._total):
            self._parts, self._total = parts, total
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        draw_bar(painter, self._parts, self._total, QRectF(self.rect()))
        painter.end()


def draw_bar(painter: QPainter, parts: tuple[BarPart, ...], total: int, bar: QRectF) -> None:
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
