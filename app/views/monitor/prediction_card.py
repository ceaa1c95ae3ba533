"""Expert predictors, their accuracy, and wasted prefetches."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.models.cache_figures import policies, sound
from app.theme import set_look, use_tabular_figures
from app.views.monitor.cache_card import policy_name, policy_tip, predictor_name, tier_name
from app.widgets.memory_bar import BarPart, MemoryBar
from app.widgets.quantities import number, translate
from app.widgets.scaffold import STRETCH, Card, add_items, muted_label
from engine.protocol import CacheReport, TierReport

_PARTS = 1000


class PoliciesCard(Card):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("PoliciesCard", "Policies"), parent)
        self.setAccessibleName(self.tr("Cache policies"))
        self.explain(
            self.tr(
                "When the cache is full, a policy decides which expert to evict for the next one. Each is tested on "
                "the model's actual requests; its share of hits (experts found in the cache) shows how well it would "
                "do."
            )
        )
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(10)
        self._grid.setVerticalSpacing(5)
        self._grid.setColumnStretch(1, 1)
        self._rows: list[tuple[QLabel, MemoryBar, QLabel]] = []
        self.note = muted_label(self)
        add_items(self.body, self._grid, self.note, STRETCH)

    def show_report(self, report: CacheReport | None) -> None:
        tiers = sound(report).tiers if report is not None else ()
        self.setVisible(bool(tiers))
        row = 0
        for tier in tiers:
            if len(tiers) > 1:
                self._say(row, tier_name(tier), None, is_head=True)
                row += 1
            for each in policies(tier):
                self._say(row, each.name, each.hit_rate, is_adopted=each.name == tier.policy)
                row += 1
        for widgets in self._rows[row:]:
            for widget in widgets:
                widget.hide()
        if tiers:
            self.caption.setText(self.tr("recent hit rate, each on its own"))
            self.note.setText(self._note_text(tiers))

    def _note_text(self, tiers: tuple[TierReport, ...]) -> str:
        if any(tier.is_adaptive for tier in tiers):
            return self.tr("All are simulated on the live routing; the one with the most hits is adopted.")
        return self.tr("The policy is set in the settings; the others are simulated.")

    def _say(self, row: int, name: str, rate: float | None, *, is_adopted: bool = False, is_head: bool = False) -> None:
        if row == len(self._rows):
            self._add_row()
        label, bar, value = self._rows[row]
        label.setText(name if is_head else policy_name(name))
        label.setToolTip("" if is_head else policy_tip(name))
        for text in (label, value):
            set_look(text, "tone", "adopted" if is_adopted else "head" if is_head else "")
        share = rate if rate is not None and rate >= 0 else 0.0
        part = BarPart("", round(_PARTS * share), "hit" if is_adopted else "idle", hatched=not is_adopted)
        bar.show_parts((part,), _PARTS)
        shown = "–" if rate is None or rate < 0 else self.tr("{0}%").format(number(100 * rate, 0))
        value.setText("" if is_head else self.tr("{0} in use").format(shown) if is_adopted else shown)
        value.setAccessibleName(f"{label.text()} {value.text()}")
        label.show()
        value.show()
        bar.setVisible(not is_head)

    def _add_row(self) -> None:
        label, bar, value = QLabel(self), MemoryBar(self), QLabel(self)
        for text in (label, value):
            text.setProperty("role", "secondary")
        use_tabular_figures(value)
        row = len(self._rows)
        self._grid.addWidget(label, row, 0)
        self._grid.addWidget(bar, row, 1)
        self._grid.addWidget(value, row, 2, Qt.AlignmentFlag.AlignRight)
        self._rows.append((label, bar, value))


class PredictionCard(Card):
    """Predictors in a table, and the outcome of prefetches as a bar per tier."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("PredictionCard", "Prefetching"), parent)
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
        add_items(self.body, self._said, self._grid)
        for _ in range(2):
            bar, label = MemoryBar(self), muted_label(self)
            add_items(self.body, bar, label)
            self._fates.append((bar, label))
        self.body.addStretch(1)

    @property
    def texts(self) -> list[str]:
        labels = [self._said, *(label for cells in self._cells for label in cells), *(fate[1] for fate in self._fates)]
        return [label.text() for label in labels if not label.isHidden() and label.text()]

    def show_report(self, report: CacheReport | None) -> None:
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
