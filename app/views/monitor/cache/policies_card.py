"""The active cache policy and its shadows, side by side."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.models.cache_figures import policies, sound
from app.theme import set_look, use_tabular_figures
from app.views.monitor.cache.tier_row import tier_name
from app.views.monitor.cache.words import policy_name, policy_tip
from app.widgets.memory_bar import BarPart, MemoryBar
from app.widgets.quantities import number
from app.widgets.scaffold import Card, muted_label
from engine.telemetry.messages import CacheReport, TierReport

_PARTS = 1000
"""Of a bar."""


class PoliciesCard(Card):
    """What each policy would hit on its own."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.heading.setText(self.tr("Policies"))
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
        self.body.addLayout(self._grid)
        self.body.addWidget(self.note)
        self.body.addStretch(1)

    def show_report(self, report: CacheReport | None) -> None:
        """The latest report; the card hides while there is no cache."""
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
