"""The window: sidebar, pages, and the banners above them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QByteArray, QCoreApplication, QEvent, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QDragEnterEvent, QDropEvent, QGuiApplication, QResizeEvent, QShowEvent
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QFrame,
    QGridLayout,
    QMainWindow,
    QScrollArea,
    QStackedWidget,
    QWidget,
)

from app.icons import logo
from app.services.background import LatestTask
from app.services.engine_client import EngineState
from app.services.engine_part import is_needed
from app.services.installation import Diagnosis
from app.services.updates import can_update
from app.views.main_window.machine_footer import MachineFooter
from app.views.main_window.sidebar import Sidebar
from app.widgets.asking import ask_where_to_report
from app.widgets.banner import Banner, BannerStack, Kind
from app.widgets.charts_ready import are_ready, load_charts, when_ready
from app.widgets.fields import dropped_model, model_at
from app.widgets.page import (
    BATCH,
    CHAT,
    FIRST_RUN,
    MODELS,
    TUNE,
    BatchDraft,
    Key,
    Page,
    PageEntry,
    add_shortcut,
    keys_of,
)
from app.widgets.quantities import figures
from app.widgets.scaffold import TOP, PageHeader, hbox, text_label, vbox
from engine.common.settings import STARTER
from engine.remote.endpoint import is_remote

if TYPE_CHECKING:
    from app.services.services import Services
    from engine.tuning.result import TuningResult

translate = QCoreApplication.translate

SIZE = QSize(1280, 800)
_LATER_MS = 500
"""Not while the window is opening."""
SMALLEST = QSize(640, 400)
"""Fits a notebook of 1440 x 900 pixels at a scale of 2, minus its panel and the title bar."""


class ShortcutsDialog(QDialog):
    def __init__(self, groups: Sequence[tuple[str, Sequence[Key]]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Keyboard shortcuts"))
        listed = QWidget(self)
        grid = QGridLayout(listed)
        grid.setContentsMargins(0, 0, 12, 0)
        grid.setHorizontalSpacing(24)
        grid.setVerticalSpacing(6)
        grid.setColumnStretch(1, 1)
        for name, keys in groups:
            if not keys:
                continue
            heading = text_label(listed, name, role="heading")
            heading.setContentsMargins(0, 8 if grid.rowCount() > 1 else 0, 0, 2)
            grid.addWidget(heading, grid.rowCount(), 0, 1, 2)
            for pressed, words in keys:
                row = grid.rowCount()
                key = text_label(listed, pressed)
                what = text_label(listed, words, role="secondary", wrap=True)
                grid.addWidget(key, row, 0, Qt.AlignmentFlag.AlignTop)
                grid.addWidget(what, row, 1)
        grid.setRowStretch(grid.rowCount(), 1)
        scroll = QScrollArea(self)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setAccessibleName(self.windowTitle())
        scroll.setWidget(listed)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close, self)
        buttons.rejected.connect(self.reject)
        vbox((scroll, 1), buttons, into=self, margins=(20, 20, 20, 20), gap=16)
        wanted = listed.sizeHint()
        room = parent.window().size() if parent is not None else wanted
        wide, high = max(460, wanted.width() + 60), wanted.height() + 120
        self.resize(min(wide, room.width() - 40), min(high, room.height() - 40))


class MainWindow(QMainWindow):
    """The frame around the pages; opens with the first.

    Args:
        pages: those in the sidebar.
        first_run: the one that takes the chat's place as long as there is no model.

    Signals: `charts_loaded`, once; `closing`, before the window closes; `quitting`, before people close it by Quit.
    """

    charts_loaded = Signal()
    closing = Signal()
    quitting = Signal()

    def __init__(
        self, services: Services, pages: Sequence[PageEntry], first_run: PageEntry, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.services = services
        client, settings = services.client, services.settings
        self.setWindowTitle("Switchyard")
        self.setWindowIcon(logo())
        self.setMinimumSize(SMALLEST)
        screen = QGuiApplication.primaryScreen()
        room = screen.availableSize() if screen is not None else SIZE
        self.resize(SIZE.boundedTo(room).expandedTo(SMALLEST))
        self._placed = False
        self.setAcceptDrops(True)

        self._needs_model = False
        last = settings.last_model
        self._begins_elsewhere = is_remote(last) and services.endpoints.find(last) is not None
        """Whether another server was to answer when the window was last closed."""
        self._shown = pages[0].name
        self._built: dict[str, Page] = {}
        self._outdated: set[str] = set()
        """Pages in another language than the window's."""
        self._carried: QWidget | None = None
        """What had the focus in the page that was replaced last."""
        self._crash_report: tuple[str, Callable[[], None]] | None = None
        self._loading_charts = LatestTask(self)
        self.closing.connect(self._loading_charts.close)
        self.setCentralWidget(self._build(pages, first_run))

        services.model_start.starter_missing.connect(self._on_no_model)
        services.model_start.problem.connect(self._on_model_problem)
        services.download.ended.connect(self._on_starter)
        settings.save_failed.connect(self._show_problem)
        services.hardware_change.noticed.connect(self._on_hardware_change)
        services.tuning_outrun.noticed.connect(self._on_outrun)
        services.telemetry.problem.connect(self._show_problem)
        client.state_changed.connect(self._on_engine_state)
        client.model_loaded.connect(self._on_model_loaded)
        client.responding_changed.connect(self._on_responding)
        self.show_page(self._shown)

    def speak(self, pages: Sequence[PageEntry], first_run: PageEntry) -> None:
        """Says everything in the language that is installed by now.

        A page is replaced when it is next shown, and goes on where it was; one that holds what another could not go on
        with stays as it is until then.
        """
        passing, footer = self._passing_texts(), self._footer
        centre = self._build(pages, first_run)
        self._footer.take_over(footer)
        for banner, text in passing:
            getattr(self, banner).show_text(text)
        if self._crash_report is not None:
            self.offer_crash_report(*self._crash_report)
        self._on_engine_state(self.services.client.state)
        self._show_downloads()
        self.sidebar.follow_window(self.width())
        self._outdated, self._carried = set(self._built), None
        self.show_page(self._shown)  # while the page before it still has the focus
        for page in self._built.values():
            if self.pages.indexOf(page) < 0:
                self.pages.addWidget(page)
        self.setCentralWidget(centre)
        (self._carried or self).setFocus()

    def _passing_texts(self) -> list[tuple[str, str]]:
        names = ("problem_banner", "notice_banner", "tune_banner", "card_banner")
        return [(name, getattr(self, name).text) for name in names if not getattr(self, name).isHidden()]

    def show_page(self, name: str) -> None:
        if name == FIRST_RUN:
            self._needs_model, name = True, CHAT
        self.sidebar.choose(name)
        self._shown = name
        if name == TUNE:
            self.tune_banner.hide()  # the page itself says it
        wanted = FIRST_RUN if name == CHAT and self._needs_model else name
        if wanted not in self._built and self._entries[wanted].has_charts and not are_ready():
            self._show_frame(wanted)
            return
        page = self.page(wanted)
        if self.pages.indexOf(page) < 0:
            self.pages.addWidget(page)
        self.pages.setCurrentWidget(page)
        if not self.sidebar.has_focus():  # keep the focus during keyboard navigation of the sidebar
            self._focus_page()

    def _show_frame(self, name: str) -> None:
        frame = QWidget(self.pages)
        vbox((PageHeader(self._entries[name].label, frame), TOP), into=frame, gap=-1)
        self.pages.addWidget(frame)
        self.pages.setCurrentWidget(frame)

        def fill() -> None:
            if self.pages.currentWidget() is frame:
                self.show_page(name)
            self.pages.removeWidget(frame)
            frame.deleteLater()

        when_ready(frame, fill)

    def page(self, name: str) -> Page:
        before = self._built.get(name)
        if before is None or (name in self._outdated and not before.is_in_use):
            self._outdated.discard(name)
            if before is not None:
                before.close_down()
            self._built[name] = page = self._entries[name].make(self.services)
            page.page_wanted.connect(self._leave_first_run if name == FIRST_RUN else self.show_page)
            page.batch_wanted.connect(self._to_batch)
            self.closing.connect(page.close_down)
            self.pages.addWidget(page)
            if before is not None:
                page.take_over(before)
                self._carried = page.focusWidget()
                self.pages.removeWidget(before)
                before.deleteLater()
        return self._built[name]

    def _to_batch(self, draft: BatchDraft) -> None:
        self.show_page(BATCH)
        self.page(BATCH).take_draft(draft)

    def begin(self) -> None:
        """Starts the engine, the default model unless another server is to answer, and the sensors, without waiting for
        them."""
        self.services.devices.start()
        start = self.services.model_start
        is_put_off = self._begins_elsewhere and not self.services.settings.serves_others
        if is_needed():
            part = self.services.engine_part
            part.ready.connect(start.begin)
            if is_put_off:
                start.put_off()
            else:
                self._on_no_model()
                self.services.client.start()  # for chats that other servers answer
            part.look()
        elif is_put_off:
            start.put_off()
        else:
            start.begin()
        # Loads numpy and drivers, in its own thread.
        QTimer.singleShot(_LATER_MS, self._begin_later)

    def _begin_later(self) -> None:
        self.services.telemetry.start()
        self._loading_charts.ask(load_charts, lambda _done: self.charts_loaded.emit())
        downloads = self.services.downloads
        downloads.changed.connect(self._show_downloads)
        downloads.begin()
        if can_update():
            updates = self.services.updates
            updates.offered.connect(self._on_update)
            updates.begin()

    def _show_downloads(self) -> None:
        if "downloads" in vars(self.services):
            self.sidebar.downloads.show_downloads(self.services.downloads.entries)

    def _on_update(self, version: str) -> None:
        self.notice_banner.show_text(self.tr("Switchyard {0} is available: get it in Settings.").format(version))

    def come_forward(self) -> None:
        self.setWindowState(self.windowState() & ~Qt.WindowState.WindowMinimized)
        self.show()
        self.raise_()
        self.activateWindow()

    def restart_engine(self) -> None:
        self.engine_banner.hide()
        self.services.model_start.restart()

    def show_shortcuts(self) -> None:
        page = self.pages.currentWidget()
        name = self.sidebar.button(self._shown).accessibleName()
        everywhere = keys_of(self, excluding=self.pages)
        dialog = ShortcutsDialog(
            [(name, keys_of(page) if page is not None else []), (self.tr("Everywhere"), everywhere)], self
        )
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    def quit_by_hand(self) -> None:
        self.quitting.emit()
        frame = self.windowHandle()
        if frame is not None:
            if self.isHidden():  # it would be closed without a question
                self.come_forward()
            frame.close()

    def offer_crash_report(self, report: str, dismiss: Callable[[], None]) -> None:
        """Reports that the last session crashed; the report is copied only if the user wants it."""

        def copy() -> None:
            QGuiApplication.clipboard().setText(report)
            copied.setText(self.tr("Copied"))

        def forget() -> None:
            dismiss()
            self._crash_report = None
            self.crash_banner.hide()

        def save(path: Path) -> None:
            diagnosis = Diagnosis(self)
            self.closing.connect(diagnosis.close)
            diagnosis.problem.connect(self._show_problem)
            diagnosis.written.connect(
                lambda: self.crash_banner.show_text(self.tr("The report is in {0}.").format(path))
            )
            diagnosis.write(path)

        self._crash_report = (report, dismiss)
        copied = self.crash_banner.add_action(self.tr("Copy report"), copy)
        self.crash_banner.add_action(self.tr("Save report…"), lambda: ask_where_to_report(self, save))
        self.crash_banner.add_action(self.tr("Dismiss"), forget, kind="quiet")
        self.crash_banner.show_text(
            self.tr(
                "Switchyard hit an error last time. You can copy a report of it, or save one with versions, hardware "
                "and logs; neither has prompts, answers or names, and nothing was sent."
            )
        )

    def _focus_page(self) -> None:
        page = self.pages.currentWidget()
        if page is not None:
            page.setFocus()

    # --- the engine -------------------------------------------------------------------------------

    def _on_engine_state(self, state: EngineState) -> None:
        if state is EngineState.DIED:
            self.engine_banner.show_text(self.tr("{0} Your text is kept.").format(self.services.client.last_error))
        elif state is not EngineState.STOPPED and self.services.client.is_responding:
            self.engine_banner.hide()

    def _on_responding(self, responding: bool) -> None:
        if not responding:
            self.engine_banner.show_text(self.services.client.last_error)
        elif self.services.client.state is not EngineState.DIED:
            self.engine_banner.hide()

    def _tune(self) -> None:
        self.show_page(TUNE)

    def _on_hardware_change(self, changed: tuple[str, ...]) -> None:
        words = self.tr("Your hardware has changed since the last tuning. {0}")
        self.tune_banner.show_text(words.format(" ".join(changed)))

    def _on_outrun(self, result: TuningResult) -> None:
        won = result.won
        if won is None:
            return
        if self._shown == TUNE:
            return  # the page itself says it
        words = self.tr(
            "{0} now runs at {1} tokens/s, much faster than the {2} that Tune measured: the machine was busy then. "
            "Tune again to find the best settings."
        )
        self.tune_banner.show_text(words.format(result.model, figures(result.outrun), figures(won.tokens_per_s)))

    def _on_model_loaded(self) -> None:
        self.problem_banner.hide()
        model = self.services.client.model
        if model is not None and model.card_is_back:
            self.card_banner.show_text(
                self.tr(
                    "The graphics card works again, but the model still runs on the CPU: reload it to use the card."
                )
            )
        else:
            self.card_banner.hide()
        if self._needs_model:
            self._needs_model = False
            if self._shown == CHAT:
                self.show_page(CHAT)

    def _reload_model(self) -> None:
        from app.widgets.asking import before_loading

        before_loading(self.services.jobs, self, self.services.model_start.restart)

    def _show_problem(self, sentence: str) -> None:
        self._to_models.hide()
        self.problem_banner.show_text(sentence)

    def _on_model_problem(self, sentence: str) -> None:
        self._show_problem(sentence)
        self._to_models.show()

    def _on_starter(self, is_there: bool) -> None:
        the = self.services
        if is_there:
            the.library.look()
            wants = the.settings.default_model == STARTER and the.client.model is None
            if wants and FIRST_RUN not in self._built:
                the.model_start.begin()

    def _on_no_model(self) -> None:
        self._needs_model = True
        if self._shown == CHAT:
            self.show_page(CHAT)

    def _leave_first_run(self, name: str) -> None:
        if name == CHAT:
            self._needs_model = False
        self.show_page(name)

    # --- building ---------------------------------------------------------------------------------

    def _build(self, pages: Sequence[PageEntry], first_run: PageEntry) -> QWidget:
        self._entries = {entry.name: entry for entry in (*pages, first_run)}
        centre = QWidget(self)
        settings = self.services.settings
        self._footer = MachineFooter(self.services.client, self.services.devices)
        self._footer.set_folded(settings.memory_folded)
        self._footer.folded.connect(lambda on: settings.set("memory_folded", on))
        self.sidebar = Sidebar(pages, self._footer, centre)
        self.sidebar.page_chosen.connect(self.show_page)
        self.engine_banner = Banner("danger", centre)
        self.engine_banner.add_action(self.tr("Restart engine"), self.restart_engine)
        self.problem_banner = _passing_banner("warning", centre)
        self._to_models = self.problem_banner.add_action(self.tr("Models"), lambda: self.show_page(MODELS))
        self._to_models.hide()
        self.notice_banner = _passing_banner("info", centre)
        self.tune_banner = _passing_banner("info", centre, (self.tr("Tune"), self._tune))
        self.card_banner = _passing_banner("info", centre, (self.tr("Reload model"), self._reload_model))
        self.crash_banner = Banner("info", centre)
        self.pages = QStackedWidget(centre)
        add_shortcut(centre, "F1", self.tr("Show these shortcuts"), self.show_shortcuts)
        add_shortcut(centre, "Ctrl+/", "", self.show_shortcuts)
        add_shortcut(centre, "Ctrl+Q", self.tr("Quit"), self.quit_by_hand)
        self._lay_out(centre)
        return centre

    def _lay_out(self, centre: QWidget) -> None:
        line = QFrame(centre)
        line.setProperty("line", "vertical")
        passing = (self.problem_banner, self.notice_banner, self.card_banner)
        right = vbox(
            BannerStack((self.engine_banner, *passing, self.tune_banner, self.crash_banner), centre),
            (self.pages, 1),
            gap=0,
        )
        centre.setProperty("pane", "background")
        centre.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        hbox(self.sidebar, line, (right, 1), into=centre, gap=0)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if dropped_model(event.mimeData()) is not None:
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        model = dropped_model(event.mimeData())
        if model is not None:
            event.acceptProposedAction()
            self._open_model(model)

    def open_files(self, names: list[str]) -> None:
        """Opens what was double-clicked: a model is loaded, other files become jobs.

        A file opened with the window cannot be refused as a dropped one can: the batch page says what it cannot read.
        """
        paths = [Path(name) for name in names]
        models = [model for model in map(model_at, paths) if model is not None]
        if models:
            self._open_model(models[-1])
        others = [path for path in paths if path not in models]
        if others:
            self.show_page(BATCH)
            self.page(BATCH).open_files(others)

    def _open_model(self, model: Path) -> None:
        from app.widgets.asking import before_loading

        before_loading(self.services.jobs, self, lambda: self.services.model_start.open(str(model)))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.sidebar.follow_window(self.width())

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self.sidebar.follow_window(self.width())

    # --- opening and closing ----------------------------------------------------------------------

    def showEvent(self, event: QShowEvent) -> None:
        if not self._placed:
            self._placed = True
            saved = QByteArray.fromBase64(QByteArray(self.services.settings.window_geometry.encode()))
            if not saved.isEmpty():
                self.restoreGeometry(saved)
        super().showEvent(event)
        self._focus_page()

    def closeEvent(self, event: QCloseEvent) -> None:
        self.closing.emit()
        self.services.settings.window_geometry = bytes(self.saveGeometry().toBase64().data()).decode()
        self.services.settings.save()
        self.services.close()
        super().closeEvent(event)


def _passing_banner(kind: Kind, parent: QWidget, action: tuple[str, Callable[[], None]] | None = None) -> Banner:
    banner = Banner(kind, parent)
    if action is not None:
        banner.add_action(*action)
    banner.add_action(translate("MainWindow", "Dismiss"), banner.hide, kind="quiet")
    return banner
