"""Expert predictors, their accuracy, and wasted prefetches."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.models.cache_figures import sound
from app.theme import set_look, use_tabular_figures
from app.views.monitor.cache.tier_row import tier_name
from app.views.monitor.cache.words import predictor_name
from app.widgets.memory_bar import BarPart, MemoryBar
from app.widgets.quantities import number
from app.widgets.scaffold import Card, muted_label
from engine.telemetry.messages import CacheReport, TierReport


class PredictionCard(Card):
    """Predictors in a table, and the outcome of prefetches as a bar per tier."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.heading.setText(self.tr("Prefetching"))
        self.setAccessibleName(self.tr("Prefetching"))
        self.explain(
            self.tr(
                "Prefetching copies experts before they are needed, guessing which will be. A right guess saves a "
                "miss, a wait for memory; a wrong one costs a useless copy."
            )
        )
        self._said = muted_label(self)
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(4)
        self._grid.setColumnStretch(0, 1)
        self._cells: list[tuple[QLabel, ...]] = []
        self._fates: list[tuple[MemoryBar, QLabel]] = []
        self.body.addWidget(self._said)
        self.body.addLayout(self._grid)
        for _ in range(2):
            bar, label = MemoryBar(self), muted_label(self)
            self.body.addWidget(bar)
            self.body.addWidget(label)
            self._fates.append((bar, label))
        self.body.addStretch(1)

    @property
    def texts(self) -> list[str]:
        """All texts, in order."""
        labels = [self._said, *(label for cells in self._cells for label in cells), *(fate[1] for fate in self._fates)]
        return [label.text() for label in labels if not label.isHidden() and label.text()]

    def show_report(self, report: CacheReport | None) -> None:
        """The latest report; the card hides while there is no cache."""
        known = sound(report) if report is not None else None
        self.setVisible(known is not None and bool(known.tiers))
        if known is None or not known.tiers:
            return
        self._said.setText(self._adopted(known))
        self._show_predictors(known)
        brought = [tier for tier in known.tiers if tier.prefetched]
        for place, (bar, label) in enumerate(self._fates):
            bar.setVisible(place < len(brought))
            label.setVisible(place < len(brought))
            if place < len(brought):
                self._show_fate(brought[place], bar, label)

    def _adopted(self, report: CacheReport) -> str:
        if report.adopted:
            if report.ahead == 1:
                return self.tr("In use: {0}, one layer ahead.").format(predictor_name(report.adopted))
            return self.tr("In use: {0}, {1} layers ahead.", "", report.ahead).format(
                predictor_name(report.adopted), report.ahead
            )
        if report.predictors:
            return self.tr("None is in use: no predictor would save more than it costs.")
        return self.tr("Nothing is predicted on this model and machine: experts are fetched on a miss.")

    def _show_predictors(self, report: CacheReport) -> None:
        rows = [
            (self.tr("Predictor"), self.tr("predicted"), self.tr("right"), self.tr("gain")),
            *(
                (
                    predictor_name(each.name),
                    self._percent(each.hit_rate),
                    self._percent(each.precision),
                    self.tr("{0} ms").format(number(1000 * each.gain_s, 1)),
                )
                for each in report.predictors
            ),
        ]
        names = ["", *(each.name for each in report.predictors)]
        while len(self._cells) < len(rows):
            self._add_row()
        tips = (
            "",
            self.tr("Share of the missing experts that was predicted"),
            self.tr("Share of the predicted, missing experts that was needed"),
            self.tr("Milliseconds its use would save per step, net of its cost"),
        )
        for number_of_row, cells in enumerate(self._cells):
            is_there = number_of_row < len(rows) and len(rows) > 1
            is_adopted = is_there and number_of_row > 0 and names[number_of_row] == report.adopted
            for column, cell in enumerate(cells):
                cell.setVisible(is_there)
                if is_there:
                    cell.setText(rows[number_of_row][column])
                    cell.setToolTip(tips[column])
                    set_look(cell, "tone", "adopted" if is_adopted else "")
            if is_there:
                cells[0].setAccessibleName(", ".join(map(" ".join, zip(rows[0], rows[number_of_row], strict=True))))

    def _show_fate(self, tier: TierReport, bar: MemoryBar, label: QLabel) -> None:
        used, wasted = tier.prefetches_used, tier.prefetches_wasted
        total = max(tier.prefetched, used + wasted)
        bar.show_parts(
            (
                BarPart(self.tr("used"), used, "hit"),
                BarPart(self.tr("wasted"), wasted, "miss", hatched=True),
            ),
            total,
        )
        shares = self._percent(used / total), self._percent(wasted / total)
        label.setText(
            self.tr("{0}: of {1} prefetched, {2} used, {3} wasted (hatched), the rest waits.").format(
                tier_name(tier), number(total, 0), *shares
            )
        )

    def _percent(self, share: float) -> str:
        return self.tr("{0}%").format(number(100 * share, 0))

    def _add_row(self) -> None:
        cells = tuple(QLabel(self) for _ in range(4))
        row = len(self._cells)
        for column, cell in enumerate(cells):
            cell.setProperty("role", "caption")
            use_tabular_figures(cell)
            side = Qt.AlignmentFlag.AlignRight if column else Qt.AlignmentFlag.AlignLeft
            self._grid.addWidget(cell, row, column, side)
        self._cells.append(cells)
