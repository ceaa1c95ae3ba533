"""The Monitor page."""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.services.engine_client import EngineClient, EngineState
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.theme import ThemeController
from app.views.monitor.expert_card import ExpertCard
from app.views.monitor.range_bar import RangeBar
from app.views.monitor.summary import SummaryCard
from app.views.monitor.timeline_card import TimelineCard
from app.widgets.page_header import PageHeader

_REFRESH_MS = 500


class MonitorPage(QWidget):
    """What happens now, or a session that was opened.

    Signals: `tune_wanted`, when the user wants to act on the advice.
    """

    tune_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        hub: TelemetryHub,
        settings: Settings,
        theme: ThemeController,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._hub, self._settings = client, hub, settings
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setAccessibleName(self.tr("Monitor"))
        self.summary = SummaryCard(self)
        self.timeline = TimelineCard(theme, settings, self)
        self.experts = ExpertCard(theme, self)
        self.ranges = RangeBar(self.timeline.view.navigator, self)
        self._lay_out()
        self._refreshing = QTimer(self, interval=_REFRESH_MS)
        self._refreshing.timeout.connect(self._refresh)
        self.summary.tune_wanted.connect(self.tune_wanted)
        hub.ready.connect(self._on_ready)
        hub.analysed.connect(self._say)
        client.state_changed.connect(self._say)
        client.model_loaded.connect(self._say)
        self._on_ready()

    def _lay_out(self) -> None:
        header = PageHeader(self.tr("Monitor"), self)
        header.row.setStretch(0, 0)
        header.row.addWidget(self.ranges)
        header.row.addStretch(1)
        self.header = header
        self.cards = QVBoxLayout()
        self.cards.setContentsMargins(20, 16, 20, 20)
        self.cards.setSpacing(14)
        self.cards.addWidget(self.summary)
        self.cards.addWidget(self.timeline, 3)
        self.row = QHBoxLayout()
        self.row.setSpacing(14)
        self.row.addWidget(self.experts, 42)
        self.cards.addLayout(self.row, 2)
        body = QWidget(self)
        body.setLayout(self.cards)
        scroll = QScrollArea(self)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setWidget(body)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(header)
        column.addWidget(scroll, 1)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._hub.start()
        self._hub.look(self, experts=True)
        self._refreshing.start()
        self._refresh()
        self.timeline.view.setFocus()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._hub.look_away(self)
        self._refreshing.stop()

    def _on_ready(self) -> None:
        if self._hub.history is not None:
            self.timeline.view.navigator.set_source(self._hub.history, recorded=False)
        self._say()

    def _refresh(self) -> None:
        """What changes more slowly than the timeline."""
        self.experts.show_event(self._hub.experts)

    def _say(self, *_news: object) -> None:
        waiting = self._hub.waiting
        alive = self._client.state in (EngineState.READY, EngineState.BUSY)
        if alive and waiting is not None and waiting.tokens:
            self.summary.show_waiting(waiting, self._hub.advice)
        else:
            self.summary.show_state(self._client.state, has_model=self._client.model is not None)
