"""The cards below the timeline: experts, cache, token; policies and prefetching; memory and sensors."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSize
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QVBoxLayout, QWidget

from app.models.token_figures import token_figures
from app.services.engine_client import EngineClient
from app.services.session_library import OpenedSession
from app.services.telemetry_hub import TelemetryHub
from app.theme import scaled
from app.views.monitor.cache import CacheCard, PoliciesCard, PredictionCard
from app.views.monitor.expert_card import ExpertCard
from app.views.monitor.machine_card import MachineCard
from app.views.monitor.memory_card import MemoryCard
from app.views.monitor.token_card import TokenCard
from app.widgets.scaffold import vbox
from engine.hardware.sensors import SensorSample
from engine.telemetry.messages import CacheReport

_WIDE_PX = 780
"""Below this width the cards are stacked."""

_SHARES, _SHARES_WITHOUT_CACHE = (42, 38, 20), (50, 25, 25)
"""Shares of the first row's width: map, cache, token; the cache card shrinks when it has only a sentence."""


class EngineCards(QWidget):
    """The latest cache report and token figures.

    Args:
        experts: the expert map's card, beside the cache's.
    """

    def __init__(
        self,
        client: EngineClient,
        hub: TelemetryHub,
        experts: ExpertCard,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._hub, self._experts = hub, experts
        self._session: OpenedSession | None = None
        self.cache = CacheCard(self)
        self.token = TokenCard(self)
        self.policies = PoliciesCard(self)
        self.prediction = PredictionCard(self)
        self.memory = MemoryCard(self)
        self.machine = MachineCard(self)
        self._revision = -1
        self._rows: list[QBoxLayout] = []
        column = vbox(into=self, gap=14)
        column.setSizeConstraint(QVBoxLayout.SizeConstraint.SetNoConstraint)  # so that the window can get narrower
        first = tuple(zip((experts, self.cache, self.token), _SHARES, strict=True))
        rows = (first, ((self.policies, 1), (self.prediction, 1)), ((self.memory, 1), (self.machine, 1)))
        for cards in rows:
            row = QBoxLayout(QBoxLayout.Direction.LeftToRight)
            row.setSpacing(14)
            for card, share in cards:
                row.addWidget(card, share)
            column.addLayout(row, 1 if cards is first else 0)
            self._rows.append(row)
        self.cache.resize_wanted.connect(client.resize_cache)
        experts.replay.valueChanged.connect(self._show_moment)

    def refresh(self) -> None:
        """Shows the latest data; cheap if nothing is new, or while a session is open."""
        hub = self._hub
        if self._session is not None:
            return
        sample = hub.sample
        used, total = (sample.ram_used, sample.ram_total) if sample is not None else (None, None)
        free = max(0, total - used) if used is not None and total is not None else None
        self.cache.show_report(hub.report, free)
        self._show_rest(hub.report, used, total)
        self.machine.show_sample(sample)
        if hub.history is not None and hub.history.revision != self._revision:
            self._revision = hub.history.revision
            self.token.show_figures(token_figures(hub.history), _watts(sample))

    def show_session(self, session: OpenedSession) -> None:
        """Shows an opened session instead of live data; the map's slider chooses the moment."""
        self._session = session
        self.machine.hide()  # sessions have sensor data in the timeline only
        self._show_moment()

    def show_live(self) -> None:
        self._session = None
        self.machine.show()
        self.cache.is_recorded = False
        self.cache.show_report(None)
        self._revision = -1
        self.refresh()

    def _show_moment(self, *_place: int) -> None:
        session = self._session
        if session is None:
            return
        maps, place = session.maps, self._experts.replay.value()
        until_ns = maps[place][0] if place < len(maps) - 1 else None
        reports = [report for at_ns, report in session.reports if until_ns is None or at_ns <= until_ns]
        self.cache.show_past(reports)
        self._show_rest(reports[-1] if reports else None, None, None)
        self.token.show_figures(token_figures(session.history, until_ns), None)

    def _show_rest(self, report: CacheReport | None, ram_used: int | None, ram_total: int | None) -> None:
        shares = _SHARES if report is not None and report.tiers else _SHARES_WITHOUT_CACHE
        for card, share in zip((self._experts, self.cache, self.token), shares, strict=True):
            self._rows[0].setStretchFactor(card, share)
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

    def minimumSizeHint(self) -> QSize:
        """As wide as the widest card: below that width the cards are stacked."""
        whole = super().minimumSizeHint()
        widest = max(card.minimumSizeHint().width() for row in self._rows for card in _shown(row))
        return QSize(min(whole.width(), widest), whole.height())

    def _turn(self) -> None:
        for row in self._rows:
            needed = sum(card.minimumSizeHint().width() + row.spacing() for card in _shown(row))
            is_wide = self.width() >= max(needed, scaled(_WIDE_PX))
            wanted = QBoxLayout.Direction.LeftToRight if is_wide else QBoxLayout.Direction.TopToBottom
            if row.direction() != wanted:
                row.setDirection(wanted)


def _shown(row: QBoxLayout) -> list[QWidget]:
    items = [row.itemAt(place) for place in range(row.count())]
    cards = [item.widget() for item in items if item is not None]
    return [card for card in cards if card is not None and not card.isHidden()]


def _watts(sample: SensorSample | None) -> float | None:
    """Total of cards and processors, as far as they report it."""
    if sample is None:
        return None
    known = [power for power in (*(gpu.power_w for gpu in sample.gpus), sample.cpu_power_w) if power is not None]
    return float(sum(known)) if known else None
