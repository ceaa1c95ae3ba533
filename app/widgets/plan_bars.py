"""A plan's memory: a bar per tier, and below it every part by name and amount."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pyqtgraph as pg
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QBrush
from PySide6.QtWidgets import QGridLayout, QLabel, QSizePolicy, QWidget

from app.theme import themed, use_tabular_figures
from app.widgets.chart import Chart
from app.widgets.flow_layout import Flow
from app.widgets.memory_bar import BarPart, MemoryBar, TierBar
from app.widgets.quantities import number, translate
from app.widgets.scaffold import hbox

_GIB = 2**30
_BAR_PX, _SWATCH_PX = 14, 9
_TENTHS = 10


def adding_up(amounts: Sequence[int], unit: int = _GIB) -> list[int]:
    """Bytes in tenths of a GB of `unit` bytes that add up to the rounded sum, so that the displayed numbers do too.

    Where rounding each one would miss the sum, those closest to the next tenth are rounded up (largest remainder).
    """
    exact = [amount * _TENTHS / unit for amount in amounts]
    whole = [int(one) for one in exact]
    missing = round(sum(exact)) - sum(whole)
    by_remainder = sorted(range(len(exact)), key=lambda at: exact[at] - whole[at], reverse=True)
    for at in by_remainder[: max(0, missing)]:
        whole[at] += 1
    return whole


class TierChart(Chart):
    """A tier's parts side by side; the rest of it is free."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._tier: TierBar | None = None
        self._bars, self._hatching = (pg.BarGraphItem(x0=[], x1=[], y0=0, height=1, pen=None) for _ in range(2))
        for item in (self._bars, self._hatching):
            self.view.addItem(item, ignoreBounds=True)
        self.view.setYRange(0, 1, padding=0)
        self.view.sigTransformChanged.connect(lambda _view: self._draw())
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setFixedHeight(_BAR_PX)
        self.dress()

    def show_tier(self, tier: TierBar) -> None:
        self._tier = tier
        self.view.setXRange(0, max(tier.total, tier.used, 1), padding=0)
        self._draw()

    def dress(self) -> None:
        super().dress()
        self.setBackgroundBrush(themed("border"))
        self._draw()

    def _draw(self) -> None:
        parts = [part for part in self._tier.parts if part.amount > 0] if self._tier is not None else []
        ends = [0, *itertools.accumulate(part.amount for part in parts)]
        hatching = [
            self.hatched(themed(part.colour), part.pattern) if part.hatched else QBrush(Qt.BrushStyle.NoBrush)
            for part in parts
        ]
        self._bars.setOpts(
            x0=ends[:-1], x1=ends[1:], pen=self.pen(themed("surface")), brushes=[part.ground for part in parts]
        )
        self._hatching.setOpts(x0=ends[:-1], x1=ends[1:], brushes=hatching)


class Legend(Flow):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent=parent, gap=3)
        self._entries: list[tuple[QWidget, MemoryBar, QLabel, QLabel]] = []

    def show_labels(self, labels: list[tuple[str, str, BarPart | None]]) -> None:
        while len(self._entries) < len(labels):
            self._add_entry()
        for at, (entry, swatch, name, amount) in enumerate(self._entries):
            entry.setVisible(at < len(labels))
            if at < len(labels):
                part = labels[at][2]
                swatch.show_parts((replace(part, amount=1),) if part is not None else (), 1)
                name.setText(labels[at][0])
                amount.setText(labels[at][1])

    def _add_entry(self) -> None:
        entry = QWidget(self)
        swatch, name, amount = MemoryBar(entry), QLabel(entry), QLabel(entry)
        swatch.setFixedSize(_SWATCH_PX, _SWATCH_PX)
        name.setProperty("role", "secondary")
        amount.setProperty("tone", "amount")
        use_tabular_figures(amount)
        hbox(swatch, name, amount, into=entry, margins=(0, 0, 12, 0), gap=5)
        self.add(entry)
        self._entries.append((entry, swatch, name, amount))


class PlanBars(QWidget):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._rows: list[tuple[QLabel, QLabel, TierChart, Legend]] = []
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setVerticalSpacing(4)
        self._grid.setColumnStretch(1, 1)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(self.tr("Memory by tier"))

    def show_tiers(self, tiers: tuple[TierBar, ...]) -> None:
        while len(self._rows) < len(tiers):
            self._add_row()
        said = []
        for row, tier in zip(self._rows, tiers, strict=False):
            name, amount, chart, legend = row
            labels = self._labels(tier)
            said.append(
                f"{tier.name} {self._amount(tier)}: "
                + ", ".join(
                    f"{part_name} {translate('Fit', '{0} GB').format(part_amount)}"
                    for part_name, part_amount, _part in labels
                )
            )
            name.setText(tier.name)
            amount.setText(self._amount(tier))
            chart.show_tier(tier)
            legend.show_labels(labels)
        for at, row in enumerate(self._rows):
            for widget in row:
                widget.setVisible(at < len(tiers))
        self.setAccessibleDescription("\n".join(said))
        self.setToolTip("\n".join(said))

    def event(self, event: QEvent) -> bool:
        handled = super().event(event)
        if event.type() in (QEvent.Type.Resize, QEvent.Type.LayoutRequest):
            height = self._grid.heightForWidth(self.width())
            if 0 <= height != self.minimumHeight():
                self.setFixedHeight(height)
        return handled

    def _add_row(self) -> None:
        name, amount, legend = QLabel(self), QLabel(self), Legend(self)
        name.setProperty("tone", "head")
        amount.setProperty("tone", "amount")
        use_tabular_figures(amount)
        chart, top = TierChart(self), 4 * len(self._rows)
        self._grid.addWidget(name, top, 0)
        self._grid.addWidget(amount, top, 1, Qt.AlignmentFlag.AlignRight)
        self._grid.addWidget(chart, top + 1, 0, 1, 2)
        self._grid.addWidget(legend, top + 2, 0, 1, 2)
        self._grid.setRowMinimumHeight(top + 3, 6)
        self._rows.append((name, amount, chart, legend))

    def _labels(self, tier: TierBar) -> list[tuple[str, str, BarPart | None]]:
        parts = [part for part in tier.parts if part.amount > 0]
        amounts = [_tenths(one) if one else self.tr("under {0}").format(_tenths(1)) for one in self._tenths(tier)]
        found: list[tuple[str, str, BarPart | None]] = [
            (part.name, amount, part) for part, amount in zip(parts, amounts, strict=False)
        ]
        if len(amounts) > len(parts):
            found.append((self.tr("free"), amounts[-1], None))
        return found

    def _tenths(self, tier: TierBar) -> list[int]:
        free = tier.total - tier.used
        amounts = [part.amount for part in tier.parts if part.amount > 0]
        return adding_up([*amounts, free] if tier.total and free > 0 else amounts, tier.unit)

    def _amount(self, tier: TierBar) -> str:
        tenths = self._tenths(tier)
        if not tier.total:
            return self.tr("{0} GB").format(_tenths(sum(tenths)))
        if tier.used >= tier.total:
            return self.tr("{0} of {1} GB").format(_tenths(sum(tenths)), _tenths(*adding_up([tier.total], tier.unit)))
        return self.tr("{0} of {1} GB").format(_tenths(sum(tenths[:-1])), _tenths(sum(tenths)))


def _tenths(amount: int) -> str:
    return number(amount / _TENTHS, 1)
