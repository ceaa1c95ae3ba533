"""The Monitor page, with the timeline and what is said of it in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PySide6.QtCore import (
    QAbstractTableModel,
    QCoreApplication,
    QDateTime,
    QLocale,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    Qt,
    Signal,
)
from PySide6.QtGui import QAction, QHideEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import (
    QButtonGroup,
    QFileDialog,
    QFrame,
    QHeaderView,
    QMenu,
    QPushButton,
    QStackedWidget,
    QTableView,
    QWidget,
)

from app.services.analyser import WAITING_TOKENS, waiting_for_last
from app.services.background import LatestTask, TaskQueue, timer
from app.services.engine_client import EngineClient, EngineState
from app.services.history.gauges import Floats
from app.services.predicted_timeline import Predicted
from app.services.session_library import (
    OpenedSession,
    SessionEntry,
    export_tables,
    export_trace,
    open_session,
    sessions_in,
)
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.theme import scaled, use_tabular_figures
from app.views.monitor.engine_cards import EngineCards, ExpertCard
from app.views.monitor.second import PredictButton, SecondTimeline
from app.views.monitor.summary import SummaryCard
from app.widgets.banner import Banner
from app.widgets.page import TUNE, Page, note_keys
from app.widgets.quantities import memory
from app.widgets.scaffold import LEFT, PageBody, PageHeader, hbox, push_button, text_label, vbox
from app.widgets.timeline.lanes import LaneData, amount_text, lane_words
from app.widgets.timeline.navigator import WHOLE, Navigator, timeline_keys
from app.widgets.timeline.view import TimelineView
from engine.common.lanes import Lane
from engine.common.model_info import ModelInfo
from engine.common.paths import sessions_dir
from engine.hardware.measured import measured_ceilings
from engine.hardware.probe import probe

_REFRESH_MS = 500
_NARROW_PX = 860
"""Below this width the header uses short labels."""


_SECOND = 1_000_000_000


MOST_LISTED = 20

FirstWords = Callable[[Sequence[float]], Sequence[str]]
"""Of what was asked first after each of some times, newest first, in seconds since 1970; recordings have no text."""


class SessionsButton(QPushButton):
    """Signals: `opened(OpenedSession)`, `compared(OpenedSession)`, `reported(str)`: why a session was not opened."""

    opened = Signal(object)
    compared = Signal(object)
    reported = Signal(str)

    def __init__(self, first_words: FirstWords, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._first_words = first_words
        self.setText(self.tr("Sessions"))
        self._reading, self._naming = LatestTask(self), LatestTask(self)
        self._menu = QMenu(self)
        self._menu.aboutToShow.connect(self._fill)
        self.setMenu(self._menu)

    def wait(self) -> None:
        self._reading.close()
        self._naming.close()

    def read(self, entry: SessionEntry, *, compare: bool) -> None:
        self.setEnabled(False)
        self.setText(self.tr("Reading…"))
        self._reading.ask(lambda: open_session(entry), lambda session: self._done(session, compare=compare), self._fail)

    def _fill(self) -> None:
        self._naming.forget()
        self._menu.clear()
        entries = sessions_in(sessions_dir())[:MOST_LISTED]
        if not entries:
            self._menu.addAction(self.tr("None yet: ask something in Chat")).setEnabled(False)
            return
        named: list[tuple[QAction, QAction]] = []
        self._menu.addSection(self.tr("Open"))
        compare = QMenu(self.tr("Compare with"), self._menu)
        for entry in entries:
            both = self._menu.addAction(session_title(entry, "")), compare.addAction(session_title(entry, ""))
            for action, is_second in zip(both, (False, True), strict=True):
                action.triggered.connect(
                    lambda _checked=False, one=entry, second=is_second: self.read(one, compare=second)
                )
            named.append(both)
        self._menu.addMenu(compare)

        def name(words: Sequence[str]) -> None:
            for entry, said, actions in zip(entries, words, named, strict=True):
                for action in actions:
                    action.setText(session_title(entry, said))

        # The store may be busy, and a menu must open at once.
        self._naming.ask(lambda: self._first_words([entry.started_s for entry in entries]), name)

    def _done(self, session: OpenedSession, *, compare: bool) -> None:
        self._rest()
        (self.compared if compare else self.opened).emit(session)

    def _fail(self, error: Exception) -> None:
        self._rest()
        self.reported.emit(getattr(error, "message", None) or self.tr("The session could not be read."))

    def _rest(self) -> None:
        self.setEnabled(True)
        self.setText(self.tr("Sessions"))


def session_title(entry: SessionEntry, first_words: str) -> str:
    when = QLocale().toString(QDateTime.fromSecsSinceEpoch(int(entry.started_s)), QLocale.FormatType.ShortFormat)
    what = ": ".join(part for part in (entry.model, first_words) if part)
    return "   ".join(part for part in (what.replace("&", "&&"), f"{when}, {memory(entry.nbytes)}") if part)


def session_words(session: OpenedSession) -> str:
    """How it ran: `starter · cpu · bf16`, or at which servers if no model was loaded here."""
    about = session.about
    parts = [str(about[key]) for key in ("model", "device", "precision") if about.get(key)]
    return " · ".join(parts or dict.fromkeys(session.history.places.values()))


class RangeBar(QWidget):
    """10 s, 60 s, 5 min, the whole session; and freeze."""

    def __init__(self, navigator: Navigator, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._navigator = navigator
        self._is_narrow = False
        self._group = QButtonGroup(self)
        self._group.setExclusive(True)
        row = hbox(into=self, margins=(8, 0, 0, 0), gap=6)
        self._spans: dict[QPushButton, int] = {}
        for text, spoken, span_ns in (
            (self.tr("10 s"), self.tr("Show 10 seconds"), 10 * _SECOND),
            (self.tr("60 s"), self.tr("Show 60 seconds"), 60 * _SECOND),
            (self.tr("5 min"), self.tr("Show 5 minutes"), 300 * _SECOND),
            (self.tr("Session"), self.tr("Show the whole session"), WHOLE),
        ):
            button = push_button(self, text, kind="chip", checkable=True, name=spoken, tip=spoken)
            self._group.addButton(button)
            self._spans[button] = span_ns
            row.addWidget(button)
        self._group.buttonClicked.connect(self._choose)
        row.addSpacing(10)
        self.freeze = push_button(self, do=lambda: navigator.toggle(), kind="chip", checkable=True)
        row.addWidget(self.freeze)
        navigator.moved.connect(self._show)
        navigator.live_changed.connect(self._show)
        self._show()

    def set_narrow(self, is_narrow: bool) -> None:
        """Whether space is short: the last button then has a short label, and a tooltip with the rest."""
        if is_narrow != self._is_narrow:
            self._is_narrow = is_narrow
            self._show()

    def _choose(self, button: QPushButton) -> None:
        self._navigator.set_preset(self._spans[button])

    def _show(self, *_news: object) -> None:
        self._group.setExclusive(False)  # after zooming, none is checked
        for button, span_ns in self._spans.items():
            button.setChecked(span_ns == self._navigator.preset_ns)
        self._group.setExclusive(True)
        live = self._navigator.is_live
        self.freeze.setChecked(not live)
        if self._is_narrow:
            self.freeze.setText(self.tr("Freeze") if live else self.tr("Frozen"))
        else:
            self.freeze.setText(self.tr("Space freezes") if live else self.tr("Frozen: Home follows"))
        self.freeze.setToolTip(
            self.tr("Space freezes the view; recording continues") if live else self.tr("Home follows live data")
        )
        self.freeze.setAccessibleName(
            self.tr("Freeze the view; recording continues") if live else self.tr("Follow live data")
        )


class ExportButton(QPushButton):
    """Signals: `reported(str)`, a sentence on what was written or why not."""

    reported = Signal(str)

    def __init__(self, view: TimelineView, about: Callable[[], dict[str, str]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setText(self.tr("Export"))
        self.setToolTip(self.tr("Contains no text of prompts or answers"))
        self._view, self._about = view, about
        self._writing = TaskQueue(self)
        menu = QMenu(self)
        menu.addAction(self.tr("Trace for Perfetto and Chrome (JSON)…")).triggered.connect(
            lambda: self._records("json")
        )
        menu.addAction(self.tr("Tables of spans and steps (CSV)…")).triggered.connect(lambda: self._records("csv"))
        menu.addAction(self.tr("Picture (PNG)…")).triggered.connect(lambda: self._picture("png"))
        menu.addAction(self.tr("Drawing (SVG)…")).triggered.connect(lambda: self._picture("svg"))
        self.setMenu(menu)

    def wait(self) -> None:
        self._writing.close()

    def write_records(self, path: Path) -> None:
        history = self._view.navigator.history
        if history is None or not history.has_engine:
            self.reported.emit(self.tr("Nothing to export yet: ask something in Chat first."))
            return
        past, about = history.copy(), self._about()

        def write() -> int:
            return export_tables(past, path) if path.suffix == ".csv" else export_trace(past, path, about)

        self._writing.add(
            write,
            lambda count: self.reported.emit(self.tr("{0} spans written to {1}").format(count, path)),
            lambda error: self._fail(path, error),
        )

    def write_picture(self, path: Path) -> None:
        done = self._view.write_picture(path)
        self.reported.emit(
            self.tr("Written to {0}").format(path)
            if done
            else self.tr("{0} could not be written; choose another folder.").format(path)
        )

    def _records(self, suffix: str) -> None:
        if path := self._ask(suffix):
            self.write_records(path)

    def _picture(self, suffix: str) -> None:
        if path := self._ask(suffix):
            self.write_picture(path)

    def _ask(self, suffix: str) -> Path | None:
        self._view.navigator.freeze()
        name = time.strftime(f"switchyard-%Y%m%d-%H%M%S.{suffix}")
        chosen, _ = QFileDialog.getSaveFileName(self, self.tr("Export"), name, f"*.{suffix}")
        return Path(chosen).with_suffix(f".{suffix}") if chosen else None

    def _fail(self, path: Path, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or type(error).__name__
        self.reported.emit(self.tr("{0} could not be written ({1}); choose another folder.").format(path, reason))


class MonitorPage(Page):
    def __init__(
        self,
        client: EngineClient,
        hub: TelemetryHub,
        settings: Settings,
        parent: QWidget | None = None,
        *,
        first_words: FirstWords = lambda times: [""] * len(times),
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
        self.sessions = SessionsButton(first_words, self)
        self.export = ExportButton(self.timeline.view, self._about, self)
        self.notice = Banner("info", self)
        self.notice.add_action(self.tr("Dismiss"), self.notice.hide, kind="quiet")
        self.session_banner = Banner("info", self)
        self.session_banner.add_action(self.tr("Back to live"), self.show_now)
        self._session: OpenedSession | None = None
        self._finding_ceilings = LatestTask(self)
        self._is_second = False
        self._lay_out()
        self._fold("monitor_details")
        settings.changed.connect(self._fold)
        self._refreshing = timer(self, self._refresh, _REFRESH_MS)
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
        header.add_buttons(self.sessions, self.export)
        self.header = header
        self.unfold = push_button(self, checkable=True)
        self.unfold.toggled.connect(lambda on: self._settings.set("monitor_details", on))
        self.details = QWidget(self)
        vbox((self.timeline, 3), (self.second, 3), (self.engine_cards, 2), into=self.details, gap=14)
        body = PageBody(self, self.summary, (self.unfold, LEFT), (self.details, 1000))
        self.cards = body.column
        self.lay_out(header, self.session_banner, self.notice, body=body)

    def _fold(self, key: str) -> None:
        if key == "monitor_details":
            shown = self._settings.monitor_details
            self.unfold.setChecked(shown)
            self.unfold.setText(
                self.tr("Hide lanes and figures") if shown else self.tr("Show lanes, caches and memory in detail")
            )
            self.details.setVisible(shown)
            self.ranges.setVisible(shown)

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
        (self.timeline.view if self._settings.monitor_details else self.unfold).setFocus()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._hub.unsubscribe(self)
        self._refreshing.stop()

    def _on_ready(self) -> None:
        if self._hub.history is not None and self._session is None:
            self.timeline.view.navigator.set_source(self._hub.history, recorded=False)
        self._say()

    def _refresh(self) -> None:
        self.experts.show_event(self._hub.experts)
        self._is_second = not self._is_second
        if self._is_second:  # the map alone is updated twice a second
            self.timeline.refresh_table()
            self.engine_cards.refresh()
            self.predict.follow()

    # --- sessions ---------------------------------------------------------------------------------

    def show_session(self, session: OpenedSession) -> None:
        self._session = session
        self._settings.monitor_details = True  # people want to look into it
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
        self._session = None
        self.predict.show_session(None)
        self.session_banner.hide()
        self.experts.show_recording(None)
        self.engine_cards.show_live()
        self._on_ready()
        self._is_second = False
        self._refresh()

    @property
    def is_in_use(self) -> bool:
        return self._session is not None or self.second.isVisibleTo(self)

    def close_down(self) -> None:
        self.sessions.wait()
        self.export.wait()
        self.predict.wait()
        self._finding_ceilings.close()

    def _compare(self, session: OpenedSession) -> None:
        self.predict.setChecked(False)
        self._settings.monitor_details = True
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
        self.summary.show_recorded(waiting_for_last(session.history, WAITING_TOKENS), session_words(session))


MACHINE_SETTING = "monitor_machine_lanes"


translate = QCoreApplication.translate

Index = QModelIndex | QPersistentModelIndex


class LaneTable(QAbstractTableModel):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._rows: list[tuple[str, str, str, str]] = []

    def show_lanes(self, lanes: list[tuple[Lane, LaneData]]) -> None:
        rows = [row for lane, data in lanes for row in rows_of_lane(lane, data)]
        if len(rows) != len(self._rows):
            self.beginResetModel()
            self._rows = rows
            self.endResetModel()
        elif rows != self._rows:
            self._rows = rows
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, 3))

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else 4

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or index.row() >= len(self._rows):
            return None
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return self._rows[index.row()][index.column()]
        if role == Qt.ItemDataRole.TextAlignmentRole and index.column():
            return int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        return None

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return (
                translate("Timeline", "Lane"),
                translate("Timeline", "Last"),
                translate("Timeline", "Average"),
                translate("Timeline", "Max"),
            )[section]
        return None


def rows_of_lane(lane: Lane, data: LaneData) -> list[tuple[str, str, str, str]]:
    """A lane's (name, last, average, maximum); none for phases, which have no values."""
    if lane.kind == "phase":
        return []
    series: list[tuple[str, Floats]] = []
    names = data.names if len(data.names) == len(data.values) else ("",) * len(data.values)
    for name, values in zip(names, data.values, strict=True):
        series.append((f"{lane_words(lane.title)}, {name}" if name else lane_words(lane.title), values))
    if data.line is not None:
        title = lane_words(lane.title)
        if lane.both_ways:
            title = translate("Timeline", "{0}, out").format(lane_words(lane.title))
        elif lane.kind != "rate":
            title = translate("Timeline", "{0}, whole machine").format(lane_words(lane.title))
        series.append((title, data.line))
    rows = []
    for title, values in series:
        known = values[np.isfinite(values)]
        figures = (float(values[-1]), float(known.mean()), float(known.max())) if len(known) else (np.nan,) * 3
        at_end, mean, most = (amount_text(lane, figure) for figure in figures)
        rows.append((title, at_end, mean, most))
    return rows


class TimelineCard(QFrame):
    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self.setProperty("card", "true")
        self.view = TimelineView(self)
        self.view.explain_lanes()
        note_keys(self.view, timeline_keys())
        self._hint = self.tr("Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.")
        self._said = text_label(self, self._hint, role="caption", wrap=True)
        self._said.setMinimumHeight(2 * self._said.fontMetrics().height())
        self._said.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        use_tabular_figures(self._said)
        self.machine = push_button(
            self,
            self.tr("Machine"),
            kind="chip",
            checkable=True,
            tip=self.tr("Lanes of the machine's own sensors, below the engine's"),
            name=self.tr("Show the machine's sensors"),
        )
        self.machine.setChecked(settings.get(MACHINE_SETTING, default=False))
        self.machine.toggled.connect(self._show_machine)
        self.view.set_shows_machine(self.machine.isChecked())
        self.table = QTableView(self)
        self._lanes = LaneTable(self)
        self.table.setModel(self._lanes)
        self.table.setAccessibleName(self.tr("Timeline as a table"))
        self.table.verticalHeader().hide()
        self.table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self.table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self._pages = QStackedWidget(self)
        self._pages.addWidget(self.view)
        self._pages.addWidget(self.table)
        self.as_table = push_button(
            self,
            self.tr("Table"),
            kind="chip",
            checkable=True,
            tip=self.tr("The same lanes as numbers"),
            name=self.tr("Show the lanes as a table"),
        )
        self.as_table.toggled.connect(self._show_table)
        self.foot = hbox((self._said, 1), self.as_table, self.machine)
        self.body = vbox((self._pages, 1), self.foot, into=self, margins=(16, 12, 12, 10), gap=4)
        self.view.said.connect(lambda text: self._said.setText(text or self._hint))

    def add_control(self, control: QWidget) -> None:
        self.foot.addWidget(control)

    def refresh_table(self) -> None:
        if self.as_table.isChecked():
            self._lanes.show_lanes(self.view.read_lanes())

    def _show_table(self, shows: bool) -> None:
        self._pages.setCurrentWidget(self.table if shows else self.view)
        self.refresh_table()

    def _show_machine(self, shows: bool) -> None:
        self._settings.set(MACHINE_SETTING, shows)
        self.view.set_shows_machine(shows)
