"""The cards below the timeline: experts, cache and token, then policies, prefetching and memory."""

from __future__ import annotations

from PySide6.QtCore import QEvent
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QVBoxLayout, QWidget

from app.models.token_figures import token_figures
from app.services.engine_client import EngineClient
from app.services.history.history import History
from app.services.telemetry_hub import TelemetryHub
from app.theme import ThemeController
from app.views.monitor.cache import CacheCard, PoliciesCard, PredictionCard
from app.views.monitor.memory_card import MemoryCard
from app.views.monitor.token_card import TokenCard
from engine.hardware.sensors import SensorSample
from engine.telemetry.messages import CacheReport

_WIDE_PX = 780
"""Narrower than this the cards stand below each other."""


class EngineCards(QWidget):
    """What the hub heard last of the cache and of tokens.

    Args:
        experts: the expert map's card, which stands beside the cache's.
    """

    def __init__(
        self,
        client: EngineClient,
        hub: TelemetryHub,
        theme: ThemeController,
        experts: QWidget,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._hub, self._theme = hub, theme
        self.cache = CacheCard(theme, self)
        self.token = TokenCard(theme, self)
        self.policies = PoliciesCard(theme, self)
        self.prediction = PredictionCard(theme, self)
        self.memory = MemoryCard(theme, self)
        self._revision = -1
        self._rows: list[QBoxLayout] = []
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(14)
        first = ((experts, 42), (self.cache, 38), (self.token, 20))
        for cards in (first, ((self.policies, 1), (self.prediction, 1), (self.memory, 1))):
            row = QBoxLayout(QBoxLayout.Direction.LeftToRight)
            row.setSpacing(14)
            for card, share in cards:
                row.addWidget(card, share)
            column.addLayout(row, 1 if cards is first else 0)
            self._rows.append(row)
        self.cache.resize_wanted.connect(client.resize_cache)

    def refresh(self) -> None:
        """What is known now; cheap if nothing is new."""
        hub = self._hub
        sample = hub.sample
        used, total = (sample.ram_used, sample.ram_total) if sample is not None else (None, None)
        free = max(0, total - used) if used is not None and total is not None else None
        self.cache.show_report(hub.report, free)
        self._show_rest(hub.report, used, total)
        if hub.history is not None and hub.history.revision != self._revision:
            self._revision = hub.history.revision
            self.token.show_figures(token_figures(hub.history), _watts(sample))

    def show_recorded(self, report: CacheReport | None, history: History | None) -> None:
        """A moment of a session that was opened, in place of what happens now."""
        self.cache.is_recorded = True
        self.cache.show_report(report)
        self._show_rest(report, None, None)
        self._revision = -1
        self.token.show_figures(token_figures(history) if history is not None else None, None)

    def show_live(self) -> None:
        """What happens now again."""
        self.cache.is_recorded = False
        self.cache.show_report(None)
        self._revision = -1
        self.refresh()

    def _show_rest(self, report: CacheReport | None, ram_used: int | None, ram_total: int | None) -> None:
        self.policies.show_report(report)
        self.prediction.show_report(report)
        self.memory.show_report(report, ram_used, ram_total)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._turn()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange:
            self._turn()

    def _turn(self) -> None:
        is_wide = self.width() >= _WIDE_PX * self._theme.font_px / 14
        wanted = QBoxLayout.Direction.LeftToRight if is_wide else QBoxLayout.Direction.TopToBottom
        for row in self._rows:
            if row.direction() != wanted:
                row.setDirection(wanted)


def _watts(sample: SensorSample | None) -> float | None:
    """Of cards and processors, as far as they tell."""
    if sample is None:
        return None
    known = [power for power in (*(gpu.power_w for gpu in sample.gpus), sample.cpu_power_w) if power is not None]
    return float(sum(known)) if known else None
