"""The Monitor page."""

from __future__ import annotations

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QScrollArea, QVBoxLayout, QWidget

from app.services.analyser import WAITING_TOKENS, waiting_for_last
from app.services.background import LatestTask
from app.services.engine_client import EngineClient, EngineState
from app.services.predicted_timeline import Predicted
from app.services.session_library import OpenedSession
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.theme import scaled
from app.views.monitor.engine_cards import EngineCards
from app.views.monitor.expert_card import ExpertCard
from app.views.monitor.exporting import ExportButton
from app.views.monitor.predicting import PredictButton
from app.views.monitor.range_bar import RangeBar
from app.views.monitor.second import SecondTimeline
from app.views.monitor.sessions import SessionsButton, session_words
from app.views.monitor.summary import SummaryCard, waiting_sentence
from app.views.monitor.timeline_card import TimelineCard
from app.widgets.banner import Banner
from app.widgets.page import TUNE, Page
from app.widgets.page_header import PageHeader
from engine.common.model_info import ModelInfo
from engine.hardware.measured import measured_ceilings
from engine.hardware.probe import probe

_REFRESH_MS = 500
_NARROW_PX = 860
"""Below this width the header uses short labels."""


class MonitorPage(Page):
    """Live data, or an opened session."""

    def __init__(
        self,
        client: EngineClient,
        hub: TelemetryHub,
        settings: Settings,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._hub, self._settings = client, hub, settings
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setAccessibleName(self.tr("Monitor"))
        self.summary = SummaryCard(self)
        self.timeline = TimelineCard(settings, self)
        self.experts = ExpertCard(self)
        self.engine_cards = EngineCards(client, hub, self.experts, self)
        self.ranges = RangeBar(self.timeline.view.navigator, self)
        self.second = SecondTimeline(self.timeline.view, self)
        self.predict = PredictButton(client, hub, self.timeline.view.navigator, self)
        self.timeline.add_control(self.predict)
        self.sessions = SessionsButton(self)
        self.export = ExportButton(self.timeline.view, self._about, self)
        self.notice = Banner("info", self)
        self.notice.add_action(self.tr("Dismiss"), self.notice.hide, kind="quiet")
        self.session_banner = Banner("info", self)
        self.session_banner.add_action(self.tr("Back to live"), self.show_now)
        self._session: OpenedSession | None = None
        self._finding_ceilings = LatestTask(self)
        self._is_second = False
        self._lay_out()
        self._refreshing = QTimer(self, interval=_REFRESH_MS)
        self._refreshing.timeout.connect(self._refresh)
        self.summary.tune_wanted.connect(lambda: self.page_wanted.emit(TUNE))
        self.sessions.opened.connect(self.show_session)
        self.sessions.compared.connect(self._compare)
        self.sessions.reported.connect(self.notice.show_text)
        self.export.reported.connect(self.notice.show_text)
        self.predict.reported.connect(self.notice.show_text)
        self.predict.predicted.connect(self._show_predicted)
        self.predict.unwanted.connect(self._drop_predicted)
        self.second.dismissed.connect(lambda: self.predict.setChecked(False))
        client.model_loaded.connect(self._find_ceilings)
        hub.ready.connect(self._on_ready)
        hub.analysed.connect(self._say)
        client.state_changed.connect(self._say)
        client.model_loaded.connect(self._say)
        self._on_ready()
        if client.model is not None:
            self._find_ceilings(client.model)

    def _lay_out(self) -> None:
        header = PageHeader(self.tr("Monitor"), self)
        header.set_middle(self.ranges)
        header.row.addWidget(self.sessions)
        header.row.addWidget(self.export)
        self.header = header
        self.cards = QVBoxLayout()
        self.cards.setContentsMargins(20, 16, 20, 20)
        self.cards.setSpacing(14)
        self.cards.addWidget(self.summary)
        self.cards.addWidget(self.timeline, 3)
        self.cards.addWidget(self.second, 3)
        self.cards.addWidget(self.engine_cards, 2)
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
        column.addWidget(self.session_banner)
        column.addWidget(self.notice)
        column.addWidget(scroll, 1)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.ranges.set_narrow(self.width() < scaled(_NARROW_PX))

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._hub.start()
        self._hub.subscribe(self, experts=True)
        self._refreshing.start()
        self._is_second = False
        self._refresh()
        self.timeline.view.setFocus()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._hub.unsubscribe(self)
        self._refreshing.stop()

    def _on_ready(self) -> None:
        if self._hub.history is not None and self._session is None:
            self.timeline.view.navigator.set_source(self._hub.history, recorded=False)
        self._say()

    def _refresh(self) -> None:
        """Updates what changes more slowly than the timeline."""
        self.experts.show_event(self._hub.experts)
        self._is_second = not self._is_second
        if self._is_second:  # the map alone is updated twice a second
            self.timeline.refresh_table()
            self.engine_cards.refresh()
            self.predict.follow()

    # --- sessions ---------------------------------------------------------------------------------

    def show_session(self, session: OpenedSession) -> None:
        """Shows a recorded session instead of live data; recording continues."""
        self._session = session
        self.timeline.view.navigator.set_source(session.history, recorded=True)
        self.predict.show_session(session)
        self.experts.show_recording(session.maps)
        self.engine_cards.show_session(session)
        words = self.tr("A recorded session: {0}.").format(session_words(session))
        if not session.recorded.is_whole:
            words += " " + self.tr("It ends early; everything intact is shown.")
        self.session_banner.show_text(words)
        self._say()

    def show_now(self) -> None:
        """Shows live data."""
        self._session = None
        self.predict.show_session(None)
        self.session_banner.hide()
        self.experts.show_recording(None)
        self.engine_cards.show_live()
        self._on_ready()
        self._is_second = False
        self._refresh()

    def close_down(self) -> None:
        """Waits for file reads and writes; called before the window closes."""
        self.sessions.wait()
        self.export.wait()
        self.predict.wait()
        self._finding_ceilings.close()

    def _compare(self, session: OpenedSession) -> None:
        self.predict.setChecked(False)
        self.second.show_history(self.tr("Compared with"), session_words(session), session.history)

    def _show_predicted(self, predicted: Predicted) -> None:
        self.second.show_predicted(predicted, self.predict.measured_tokens_per_s())

    def _drop_predicted(self) -> None:
        if self.second.predicted is not None:
            self.second.dismiss()

    def _about(self) -> dict[str, str]:
        if self._session is not None:
            return {key: str(value) for key, value in self._session.about.items() if isinstance(value, str | int)}
        model = self._client.model
        return {} if model is None else {"model": model.name, "device": model.device, "precision": model.precision}

    def _find_ceilings(self, model: ModelInfo) -> None:
        self._finding_ceilings.ask(lambda: measured_ceilings(probe(), model.device), self.timeline.view.set_ceilings)

    def _say(self, *_news: object) -> None:
        if self._session is not None:
            self._say_of_session(self._session)
            return
        findings = self._hub.findings
        alive = self._client.state in (EngineState.READY, EngineState.BUSY)
        if alive and findings is not None and findings.waiting.tokens:
            self.summary.show_waiting(findings.waiting, findings.advice)
        else:
            self.summary.show_state(self._client.state, has_model=self._client.model is not None)

    def _say_of_session(self, session: OpenedSession) -> None:
        waited = waiting_for_last(session.history, WAITING_TOKENS)
        sentence = waiting_sentence(waited) if waited.tokens else self.tr("Nothing was decoded in this session.")
        self.summary.show_recorded(sentence, session_words(session))
