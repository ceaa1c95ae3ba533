"""The window's process: creates all services and passes them on."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import (
    QCoreApplication,
    QEvent,
    QObject,
    Qt,
    QTimer,
    Signal,
    SignalInstance,
)
from PySide6.QtGui import QFileOpenEvent, QGuiApplication
from PySide6.QtWidgets import QApplication, QWidget

from app.icons import logo
from app.languages import Languages, missing_words
from app.services.background import timer
from app.services.crash_reports import CrashReports, close_window_log, open_window_log
from app.services.data_folder import Claim, SingleInstance, holds_our_data, planned_change, what_is_no_file
from app.services.engine_client import EngineClient
from app.services.settings import Settings
from app.startup_report import reached, report_if_asked
from app.theme import ThemeController
from app.views.main_window.window import MainWindow
from app.widgets.charts_ready import when_ready
from app.widgets.page import BATCH, CHAT, FIRST_RUN, MODELS, MONITOR, SETTINGS, TUNE, Page, PageEntry
from app.widgets.scaffold import vbox
from engine.checkpoint.mirror import begin_with_proxy
from engine.common.files import make_private
from engine.common.installed import version
from engine.common.paths import data_dir, log_dir, own_dirs

if TYPE_CHECKING:
    from app.services.services import Services
    from app.views.chat.model_picker import ModelPicker
    from app.widgets.starter_offer import StarterOffer

_log = logging.getLogger("switchyard.window")
translate = QCoreApplication.translate

STREAMING_REPORT_VARIABLE = "SWITCHYARD_STREAMING_REPORT"
"""Names a file: the window sends prompts and writes how long GUI events waited (`bench startup`)."""

TRAY_AFTER_MS = 400
"""Not while the window is opening."""


_EVERY_MS = 500


class GarbageCollection(QObject):
    """Takes over from Python's automatic collection, for the rest of the process."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        gc.disable()
        looking = timer(self, collect_if_due, _EVERY_MS)
        looking.start()


def collect_if_due() -> None:
    """Collects the oldest generation that has reached its threshold, as Python would; call it on the GUI thread."""
    thresholds = gc.get_threshold()  # 0: never
    for generation, count in reversed(list(enumerate(gc.get_count()))):
        if 0 < thresholds[generation] < count:
            gc.collect(generation)
            return


def main(argv: list[str] | None = None, begun: Callable[[MainWindow], object] = lambda _window: None) -> int:
    """Opens the window, and the files that are named; returns the exit code.

    A second start on one data folder raises the first window, which opens the files, and returns 0.
    `begun` gets the window before it is shown.
    """
    reached("process and imports")
    words = argv or sys.argv
    if (odd := what_is_no_file()) is not None:  # before anything waits for it
        from app.views.data_folder_start import warn_no_file

        _application(words)
        warn_no_file(odd)
        return 2
    make_private(own_dirs())
    reports = CrashReports(log_dir())
    reports.install()
    open_window_log(log_dir())
    begin_with_proxy()
    files = [os.path.abspath(word) for word in words[1:] if not word.startswith("-")]
    try:
        return _run(_application(words), reports, files, begun)
    finally:
        close_window_log()
        reports.uninstall()


def _application(argv: list[str]) -> Application:
    QGuiApplication.setHighDpiScaleFactorRoundingPolicy(Qt.HighDpiScaleFactorRoundingPolicy.PassThrough)
    app = Application(argv)
    app.setApplicationName("Switchyard")
    app.setApplicationDisplayName("Switchyard")
    app.setOrganizationName("Switchyard")
    app.setDesktopFileName("switchyard")
    app.languages = Languages(app)
    GarbageCollection(app)
    return app


def _run(app: Application, reports: CrashReports, files: list[str], begun: Callable[[MainWindow], object]) -> int:
    reached("application")
    settings = Settings()
    app.languages.set_choice(settings.language)
    theme = ThemeController(settings.theme, settings.font_px)
    app.setWindowIcon(logo())
    instance = _claim_data_folder(files)
    if isinstance(instance, int):
        return instance

    from app.services.chat_store import ChatStore  # only after the data folder has been claimed
    from app.services.services import Services

    services = Services.around(EngineClient(), ChatStore(), settings, theme)
    reached("services")
    window = MainWindow(services, page_entries(), first_run_entry())
    if settings.notice:
        window.notice_banner.show_text(settings.notice)
    elif (missing := app.languages.missing) and settings.language_told != missing:
        settings.language_told = missing
        window.notice_banner.show_text(missing_words(missing))
    report = reports.pending()
    if report:
        window.offer_crash_report(report, reports.dismiss)
    instance.raise_requested.connect(window.come_forward)
    instance.raise_requested.connect(window.open_files)
    instance.other_version.connect(lambda other: window.notice_banner.show_text(_two_versions(other)))
    report_if_asked(window)
    if path := os.environ.get(STREAMING_REPORT_VARIABLE):
        from app.streaming_report import StreamingReport

        StreamingReport(window, Path(path))
    begun(window)
    for ending in (signal.SIGINT, signal.SIGTERM):  # handled at the next sensor sample, within half a second
        # Within whatever this thread is doing, such as starting a thread: it ends that first.
        signal.signal(ending, lambda *_: QTimer.singleShot(0, app, app.quit))
    speak_as_set(app.languages, settings, window)
    reached("window")
    window.show()
    QTimer.singleShot(TRAY_AFTER_MS, window, lambda: _tray(window, services, app))
    app.files_opened.connect(window.open_files)
    QTimer.singleShot(0, window, window.begin)
    if files:
        QTimer.singleShot(0, window, lambda: window.open_files(files))
    if settings.serves_others:
        QTimer.singleShot(0, window, lambda: services.api_server.begin())
    gc.freeze()  # what is there by now is there for good: collections need not look through it
    window.charts_loaded.connect(gc.freeze)  # and their modules, which took them 100 ms of this thread
    code = app.exec()
    services.client.close_now()
    services.store.close()
    settings.save()
    instance.release()
    window.deleteLater()
    return code


def speak_as_set(languages: Languages, settings: Settings, window: MainWindow) -> None:
    def choose(key: str) -> None:
        if key == "language":  # later: what it was chosen with is replaced, too
            QTimer.singleShot(0, window, lambda: languages.set_choice(settings.language))

    settings.changed.connect(choose)
    languages.changed.connect(lambda: window.speak(page_entries(), first_run_entry()))


def _tray(window: MainWindow, services: Services, app: Application) -> None:
    from app.views.tray import QuickPrompt, Tray

    def make() -> QuickPrompt:
        prompt = QuickPrompt(services.store, services.answers, services.settings, services.endpoints)
        prompt.began.connect(lambda chat: window.page(CHAT).take_chat(chat))
        prompt.open_wanted.connect(lambda chat_id: _open_chat(window, chat_id))
        return prompt

    tray = Tray(services.settings, make, window)
    tray.window_wanted.connect(window.come_forward)
    tray.quit_wanted.connect(window.quit_by_hand)
    window.quitting.connect(tray.leave)
    app.quitting.connect(tray.leave)
    app.quitting.connect(lambda: window.close() if window.isHidden() else None)  # Qt closes what is shown alone
    window.closing.connect(tray.close)
    tray.watch()
    app.languages.changed.connect(tray.speak)


def _open_chat(window: MainWindow, chat_id: str) -> None:
    window.come_forward()
    window.show_page(CHAT)
    window.page(CHAT).open_chat(chat_id)


def _two_versions(other: str) -> str:
    text = translate("Versions", "You started Switchyard {0}, and this window is {1}: close it, then start the other.")
    return text.format(other, version())


class Application(QApplication):
    """Hears which files macOS opens with it, which are events of the application alone.

    Not a filter: that would see every event of every widget, in Python.

    Signals:
        files_opened: a list of paths.
        quitting: all windows are about to be closed.
    """

    files_opened = Signal(list)
    quitting = Signal()
    languages: Languages

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Quit:
            self.quitting.emit()
        if isinstance(event, QFileOpenEvent) and event.file():
            self.files_opened.emit([event.file()])
            return True
        return super().event(event)


# --- the pages --------------------------------------------------------------------------------------


def page_entries() -> tuple[PageEntry, ...]:
    """The registry of pages, in the sidebar's order.  Each imports its modules when it is first shown."""
    return (
        PageEntry(CHAT, translate("Pages", "Chat"), _chat),
        PageEntry(BATCH, translate("Pages", "Batch"), _batch),
        PageEntry(MONITOR, translate("Pages", "Monitor"), _monitor, has_charts=True),
        PageEntry(TUNE, translate("Pages", "Tune"), _tune, has_charts=True),
        PageEntry(MODELS, translate("Pages", "Models"), _models, has_charts=True),
        PageEntry(SETTINGS, translate("Pages", "Settings"), _settings),
    )


def first_run_entry() -> PageEntry:
    """What takes the chat's place as long as there is no model."""
    return PageEntry(FIRST_RUN, translate("Pages", "Choose a first model"), _first_run)


def _first_run(services: Services) -> Page:
    from app.views.first_run import FirstRunPage
    from app.widgets.asking import ask_model

    the = services
    page = FirstRunPage(the.client, the.hub, the.downloads, the.library, the.download, the.settings, the.engine_part)
    page.load_wanted.connect(the.model_start.begin)
    page.file_wanted.connect(lambda: ask_model(page, lambda model: the.model_start.open(str(model))))
    return page


def _chat(services: Services) -> Page:
    from app.views.chat.chat_view import ChatView
    from app.widgets.asking import before_loading

    the = services
    page = ChatView(
        the.client,
        the.store,
        the.settings,
        the.answers,
        the.token_counter,
        the.library,
        the.speeds,
        the.endpoints,
        the.documents,
        the.prompts,
        the.presets,
        lambda: the.tools,
    )
    page.add_strip(_strip_for(page, services))
    page.restart_wanted.connect(services.model_start.restart)
    page.reload_wanted.connect(lambda: before_loading(services.jobs, page, services.model_start.reload))
    _connect_picker(page.picker, page, services)
    page.picker.add_starter(_starter_for(page.picker, services))
    return page


def _connect_picker(picker: ModelPicker, page: Page, services: Services) -> None:
    from app.widgets.asking import ask_model

    load = _connect_loading(picker.load_wanted, picker.unload_wanted, page, services)
    picker.file_wanted.connect(lambda: ask_model(page, load))
    picker.cancel_wanted.connect(services.model_start.cancel)


def _connect_loading(
    load_wanted: SignalInstance, unload_wanted: SignalInstance, page: Page, services: Services
) -> Callable[[object], None]:
    from app.widgets.asking import before_loading

    start = services.model_start

    def load(model: object) -> None:
        before_loading(services.jobs, page, lambda: start.open(str(model)))

    load_wanted.connect(load)
    unload_wanted.connect(lambda: before_loading(services.jobs, page, start.unload))
    return load


def _batch(services: Services) -> Page:
    from app.views.batch.page import BatchPage

    page = BatchPage(services.client, services.jobs, services.sample)
    page.add_strip(_strip_for(page, services))
    return page


def _monitor(services: Services) -> Page:
    from app.views.monitor.page import MonitorPage

    return MonitorPage(
        services.client, services.telemetry, services.settings, first_words=services.store.first_words_after
    )


def _tune(services: Services) -> Page:
    from app.views.tune.page import TunePage

    page = TunePage(services.client, services.settings, services.tuning, services.jobs)
    services.tuning_outrun.noticed.connect(page.on_outrun)
    page.add_starter(_starter_for(page, services))
    return page


def _models(services: Services) -> Page:
    from app.views.models.page import ModelsPage

    the = services
    page = ModelsPage(the.client, the.settings, the.library, the.downloads, the.hub, the.speeds)
    _connect_loading(page.load_wanted, page.unload_wanted, page, services)
    page.add_starter(_starter_for(page, services))
    return page


def _settings(services: Services) -> Page:
    from app.services.updates import can_update
    from app.views.settings.page import SettingsPage
    from app.widgets.asking import before_loading

    updates = services.updates if can_update() else None
    the = services
    page = SettingsPage(the.settings, the.theme, the.api_server, the.endpoints, the.tools, updates)
    page.catalogue_changed.connect(lambda: services.hub.look_again(services.settings.engine("").device))
    page.token_forgotten.connect(lambda: services.downloads.use_new_tokens())
    page.reload_wanted.connect(lambda: before_loading(services.jobs, page, services.model_start.begin))
    timing = services.speed_test
    page.timing_wanted.connect(lambda: before_loading(services.jobs, page, timing.start))
    timing.began.connect(page.computing.show_timing)
    timing.ended.connect(page.computing.show_timed)
    return page


def _starter_for(page: QWidget, services: Services) -> StarterOffer:
    from app.widgets.starter_offer import StarterOffer

    return StarterOffer(services.download, parent=page)


def _strip_for(page: Page, services: Services) -> Callable[[QWidget], QWidget]:
    def make(parent: QWidget) -> QWidget:
        place = QWidget(parent)
        room = vbox(into=place, gap=-1)

        def fill() -> None:
            from app.widgets.timeline.strip import TimelineStrip

            strip = TimelineStrip(services.telemetry, place)
            strip.opened.connect(lambda: page.page_wanted.emit(MONITOR))
            room.addWidget(strip)

        when_ready(place, fill)
        return place

    return make


# --- the data folder --------------------------------------------------------------------------------


def _claim_data_folder(files: Sequence[str] = ()) -> SingleInstance | int:
    from app.views import data_folder_start as dialogs  # rarely needed

    if dialogs.chosen_folder_is_missing() and not dialogs.ask_about_missing_folder():
        return 0
    while True:
        instance = SingleInstance(data_dir())
        claim = instance.claim(files=files)
        if claim is Claim.RAISED_OTHER:
            _log.info("raised the window that uses this data folder")
            return 0
        if claim is Claim.NOT_RESPONDING:
            dialogs.warn_not_responding()
            return 1
        if claim is Claim.NOT_WRITABLE:
            if holds_our_data(data_dir()) and not os.access(data_dir(), os.W_OK):
                return instance  # chats can still be read; the store says that new ones are not saved
            dialogs.warn_not_writable()
            return 1
        change = planned_change()
        if change is None:
            return instance
        dialogs.carry_out_change(change)
        instance.release()  # claim the folder that is now in use instead
