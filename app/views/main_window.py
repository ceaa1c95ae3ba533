"""The window: sidebar, pages, and the calm lines above them that tell what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QByteArray, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QGuiApplication, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QMainWindow, QStackedWidget, QVBoxLayout, QWidget

from app.icons import logo
from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient, EngineState
from app.services.hardware_change import HardwareChange
from app.services.model_start import ModelStart
from app.services.settings import Settings
from app.services.starter_download import StarterDownload
from app.services.telemetry_hub import TelemetryHub
from app.services.tuning_outrun import TuningOutrun
from app.theme import ThemeController
from app.views.machine_footer import MachineFooter
from app.views.models_placeholder import models_placeholder
from app.views.shortcuts_dialog import ShortcutsDialog
from app.views.sidebar import Sidebar
from app.views.starter_panel import StarterPanel
from app.widgets.banner import Banner, BannerStack
from app.widgets.quantities import figures
from app.widgets.shortcuts import add_shortcut, keys_of

if TYPE_CHECKING:
    from app.services.batch_jobs import BatchJobs
    from engine.tuning.result import TuningResult

CHAT, BATCH, MONITOR, TUNE, SETTINGS = 0, 1, 2, 3, 5
SIZE = QSize(1280, 800)
_TELEMETRY_AFTER_MS = 500
"""Not while the window is being opened."""
SMALLEST = QSize(640, 400)
"""Fits a notebook of 1440 x 900 pixels at a scale of 2, less its panel and the window's title bar."""


class MainWindow(QMainWindow):
    """Takes its services ready made and its chat page from `make_chat`, which is called once.

    `make_strip` makes what shows the machine at work in little, on pages that are about something else.

    Signals: `closing`, before the window closes.
    """

    closing = Signal()

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        theme: ThemeController,
        make_chat: Callable[[], QWidget],
        *,
        telemetry: TelemetryHub | None = None,
        make_strip: Callable[[QWidget], QWidget] | None = None,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client = client
        self._settings = settings
        self._theme = theme
        self.setWindowTitle("Switchyard")
        self.setWindowIcon(logo(theme.theme))
        self.setMinimumSize(SMALLEST)
        screen = QGuiApplication.primaryScreen()
        room = screen.availableSize() if screen is not None else SIZE
        self.resize(SIZE.boundedTo(room).expandedTo(SMALLEST))
        self._placed = False

        self.telemetry = telemetry or TelemetryHub(client, settings, DeviceMonitor(self), self)
        self.devices = self.telemetry.devices
        self.model_start = ModelStart(client, settings, self)
        self.download = StarterDownload(self)
        self.sidebar = Sidebar(theme, MachineFooter(client, self.devices, theme), self)
        self.engine_banner = Banner("danger", theme, self)
        self.engine_banner.add_action(self.tr("Restart engine"), self.restart_engine)
        self.problem_banner = self._passing_banner("warning", theme)
        self.notice_banner = self._passing_banner("info", theme)
        self.tune_banner = Banner("info", theme, self)
        self.tune_banner.add_action(self.tr("Tune"), self._tune)
        self.tune_banner.add_action(self.tr("Dismiss"), self.tune_banner.hide, kind="quiet")
        self.hardware_change = HardwareChange(self.devices, self)
        self.tuning_outrun = TuningOutrun(client, self)
        self.crash_banner = Banner("info", theme, self)
        self.starter_panel = StarterPanel(self.download, self)
        self.pages = QStackedWidget(self)
        self._shown = CHAT
        self._built: dict[int, QWidget] = {}
        self._make_chat, self._make_strip = make_chat, make_strip
        self._recall_tuning: Callable[[], None] = lambda: None
        self._lay_out()

        self.sidebar.page_chosen.connect(self.show_page)
        self.starter_panel.ready.connect(self.model_start.begin)
        self.model_start.starter_missing.connect(self.starter_panel.offer)
        self.model_start.problem.connect(self.problem_banner.tell)
        settings.save_failed.connect(self.problem_banner.tell)
        theme.changed.connect(lambda _theme: self.sidebar.follow_window(self.width()))
        self.hardware_change.noticed.connect(self._on_hardware_change)
        self.tuning_outrun.noticed.connect(self._on_outrun)
        self.telemetry.problem.connect(self.problem_banner.tell)
        client.state_changed.connect(self._on_engine_state)
        client.model_loaded.connect(self._on_model_loaded)
        client.responding_changed.connect(self._on_responding)
        add_shortcut(self, "F1", self.tr("Show these shortcuts"), self.show_shortcuts)
        add_shortcut(self, "Ctrl+/", "", self.show_shortcuts)
        add_shortcut(self, "Ctrl+Q", self.tr("Quit"), self.quit_by_hand)
        self.show_page(CHAT)

    def show_page(self, index: int) -> None:
        """Shows a page, by its place in the sidebar."""
        self.sidebar.choose(index)
        self._shown = index
        if index == TUNE:
            self.tune_banner.hide()  # the page says it itself
        self.pages.setCurrentWidget(self.page(index))
        if not self.sidebar.has_focus():  # who walks through the sidebar with the keys stays there
            self._focus_page()

    def page(self, index: int) -> QWidget:
        """A page, by its place in the sidebar; made when it is first wanted, so that the window opens sooner."""
        if index not in self._built:
            self._built[index] = page = self._make(index)
            self.pages.addWidget(page)
        return self._built[index]

    def begin(self) -> None:
        """Starts what the window needs but does not wait for: the engine, the default model, the machine's figures."""
        self.devices.start()
        self.model_start.begin()
        QTimer.singleShot(_TELEMETRY_AFTER_MS, self.telemetry.start)  # loads numpy and drivers, in its own thread

    def come_forward(self) -> None:
        """Brings the window to the front, also from the task bar."""
        self.setWindowState(self.windowState() & ~Qt.WindowState.WindowMinimized)
        self.show()
        self.raise_()
        self.activateWindow()

    def restart_engine(self) -> None:
        """Starts the engine again, with the model that it had."""
        self.engine_banner.hide()
        self.model_start.restart()

    def show_shortcuts(self) -> None:
        """Lists the keys of the page that is shown, and those that work everywhere."""
        page = self.pages.currentWidget()
        name = self.sidebar.button(self._shown).accessibleName()
        everywhere = keys_of(self, besides=self.pages)
        dialog = ShortcutsDialog(
            [(name, keys_of(page) if page is not None else []), (self.tr("Everywhere"), everywhere)], self
        )
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    def quit_by_hand(self) -> None:
        """Closes the window as a click on its frame does: whoever has to ask first is asked."""
        frame = self.windowHandle()
        if frame is not None:
            frame.close()

    def offer_crash_report(self, report: str, dismiss: Callable[[], None]) -> None:
        """Tells that the last start ended badly; the report is copied only if the user wants it."""

        def copy() -> None:
            QGuiApplication.clipboard().setText(report)
            copied.setText(self.tr("Copied"))

        def forget() -> None:
            dismiss()
            self.crash_banner.hide()

        copied = self.crash_banner.add_action(self.tr("Copy report"), copy)
        self.crash_banner.add_action(self.tr("Dismiss"), forget, kind="quiet")
        self.crash_banner.tell(
            self.tr(
                "Switchyard hit an error last time. A report is ready to copy into a bug report; "
                "it contains no prompts or answers, and nothing was sent."
            )
        )

    def _focus_page(self) -> None:
        page = self.pages.currentWidget()
        if page is not None:
            page.setFocus()

    # --- the engine -------------------------------------------------------------------------------

    def _on_engine_state(self, state: EngineState) -> None:
        if state is EngineState.DIED:
            self.engine_banner.tell(self.tr("{0} Your text is kept.").format(self._client.last_error))
        elif state is not EngineState.STOPPED and self._client.is_responding:
            self.engine_banner.hide()

    def _on_responding(self, responding: bool) -> None:
        if not responding:
            self.engine_banner.tell(self._client.last_error)
        elif self._client.state is not EngineState.DIED:
            self.engine_banner.hide()

    def _tune(self) -> None:
        self.show_page(TUNE)

    def _on_hardware_change(self, changed: tuple[str, ...]) -> None:
        words = self.tr("Your hardware has changed since it was last tuned. {0}")
        self.tune_banner.tell(words.format(" ".join(changed)))

    def _on_outrun(self, result: TuningResult) -> None:
        won = result.won
        if won is None:
            return
        tune = self._built.get(TUNE)
        if tune is not None and tune is self.pages.currentWidget():
            self._recall_tuning()
            return  # the page says it itself
        words = self.tr(
            "{0} now runs at {1} tokens/s, much faster than the {2} that Tune measured: something else kept the "
            "machine busy then. Tune it again to find its best settings."
        )
        self.tune_banner.tell(words.format(result.model, figures(result.outrun), figures(won.tokens_per_s)))

    def _reload(self) -> None:
        from app.views.batch import BatchPage

        def load() -> None:
            self.problem_banner.hide()
            self.model_start.begin()

        batch = self._built.get(BATCH)
        batch.guard.before_another_model(load) if isinstance(batch, BatchPage) else load()

    def _batch_jobs(self) -> BatchJobs | None:
        if BATCH not in self._built:
            return None
        from app.views.batch import BatchPage

        batch = self._built[BATCH]
        return batch.jobs if isinstance(batch, BatchPage) else None

    def _on_model_loaded(self) -> None:
        self.problem_banner.hide()
        self.starter_panel.hide()

    # --- building ---------------------------------------------------------------------------------

    def _make(self, index: int) -> QWidget:
        if index == CHAT:
            return self._make_chat()
        if index == SETTINGS:
            from app.views.settings import SettingsPage

            page = SettingsPage(self._settings, self._theme, self)
            page.reload_wanted.connect(self._reload)
            page.tune_wanted.connect(self._tune)
            self.closing.connect(page.close_down)
            return page
        if index == MONITOR:
            from app.views.monitor import MonitorPage

            monitor = MonitorPage(self._client, self.telemetry, self._settings, self._theme, self)
            monitor.tune_wanted.connect(lambda: self.show_page(TUNE))
            self.closing.connect(monitor.close_down)
            return monitor
        if index == BATCH:
            from app.views.batch import make_batch_page

            batch = make_batch_page(self._client, self._theme, self)
            if self._make_strip is not None:
                batch.add_strip(self._make_strip)
            self.closing.connect(batch.close_down)
            return batch
        if index == TUNE:
            from app.views.tune import TunePage

            tune = TunePage(self._client, self._settings, self._theme, self, jobs=self._batch_jobs)
            self.closing.connect(tune.close_down)
            self._recall_tuning = tune.recall
            return tune
        return models_placeholder(self._theme)

    def _passing_banner(self, kind: str, theme: ThemeController) -> Banner:
        banner = Banner("warning" if kind == "warning" else "info", theme, self)
        banner.add_action(self.tr("Dismiss"), banner.hide, kind="quiet")
        return banner

    def _lay_out(self) -> None:
        line = QFrame(self)
        line.setProperty("line", "vertical")
        right = QVBoxLayout()
        right.setSpacing(0)
        strips = (self.engine_banner, self.problem_banner, self.notice_banner, self.tune_banner, self.crash_banner)
        right.addWidget(BannerStack((*strips, self.starter_panel), self))
        right.addWidget(self.pages, 1)
        centre = QWidget(self)
        centre.setProperty("pane", "background")
        centre.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        row = QHBoxLayout(centre)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addWidget(self.sidebar)
        row.addWidget(line)
        row.addLayout(right, 1)
        self.setCentralWidget(centre)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.sidebar.follow_window(self.width())

    # --- opening and closing ----------------------------------------------------------------------

    def showEvent(self, event: QShowEvent) -> None:
        if not self._placed:
            self._placed = True
            saved = QByteArray.fromBase64(QByteArray(self._settings.window_geometry.encode()))
            if not saved.isEmpty():
                self.restoreGeometry(saved)
        super().showEvent(event)
        self._focus_page()

    def closeEvent(self, event: QCloseEvent) -> None:
        self.closing.emit()
        self._settings.window_geometry = bytes(self.saveGeometry().toBase64().data()).decode()
        self._settings.save()
        self.download.close()
        self.devices.stop()
        self.hardware_change.close()
        self.tuning_outrun.close()
        self.telemetry.close()
        self.model_start.close()
        super().closeEvent(event)
