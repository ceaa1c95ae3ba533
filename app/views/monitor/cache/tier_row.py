"""One tier of the cache in a line: hit rate now, over the last minutes, and overall."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.models.cache_figures import hit_rate
from app.theme import use_tabular_figures
from app.widgets.quantities import number, translate
from app.widgets.rate_line import RateLine
from app.widgets.scaffold import hbox, text_label
from engine.telemetry.messages import TierReport


class TierRow(QWidget):
    """The tier last passed to `show_tier`."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._name = text_label(self, role="secondary")
        self._now = text_label(self, role="heading")
        self._rest = text_label(self, role="secondary")
        for label in (self._name, self._now, self._rest):
            use_tabular_figures(label)
        self.line = RateLine(self)
        self.line.setToolTip(self.tr("Hit rate of the last three minutes of decoding, 0 to 100%"))
        hbox(self._name, self._now, (self.line, 1), self._rest, into=self)
        self._last: float | None = None

    def show_tier(self, tier: TierReport, *, is_new: bool) -> None:
        """Shows a report of the tier.

        Args:
            is_new: whether to add it to the sparkline: not if it has been shown before.
        """
        recent = tier.recent_hit_rate if tier.recent_hit_rate >= 0 else None
        if is_new and recent is not None:
            self.line.add(recent)
        self._last = recent if recent is not None else self._last
        place = tier_name(tier)
        self._name.setText(self.tr("{0} hits").format(place))
        now = "–" if self._last is None else self.tr("{0}%").format(number(100 * self._last, 0))
        self._now.setText(now)
        overall = hit_rate(tier)
        self._rest.setText("" if overall is None else self.tr("{0}% overall").format(number(100 * overall, 0)))
        held = self.tr("{0} of {1} experts").format(number(tier.slots, 0), number(tier.most_slots, 0))
        self._rest.setToolTip(
            self.tr("Since the model was loaded: {0} of {1} lookups").format(
                number(tier.hits, 0), number(tier.lookups, 0)
            )
        )
        self.setAccessibleName(f"{self._name.text()} {now}, {self._rest.text()}, {held}")

    def forget(self) -> None:
        """Clears the history, for another model or none."""
        self._last = None
        self.line.clear()


def tier_name(tier: TierReport) -> str:
    """`VRAM` or `RAM`."""
    return translate("Fit", "VRAM") if tier.tier == "vram" else translate("Fit", "RAM")
