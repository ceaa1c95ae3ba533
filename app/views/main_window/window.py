"""The window: sidebar, pages, and the banners above them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QByteArray, QCoreApplication, QEvent, QSize, Qt, QTimer, Signal
from PySide6.QtGui import (
    QCloseEvent,
    QDragEnterEvent,
    QDropEvent,
    QGuiApplication,
    QKeySequence,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import (
    QButtonGroup,
    QDialog,
    QDialogButtonBox,
    QFrame,
    QGridLayout,
    QMainWindow,
    QPushButton,
    QScrollArea,
    QStackedWidget,
    QWidget,
)

from app.icons import IconMark, icon, logo
from app.services.background import LatestTask
from app.services.engine_client import EngineState
from app.services.engine_part import is_needed
from app.services.installation import Diagnosis
from app.services.updates import can_update
from app.theme import BODY_PX, body_px
from app.views.main_window.machine_footer import MachineFooter
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
from app.widgets.scaffold import LEFT, STRETCH, TOP, PageHeader, add_items, hbox, push_button, text_label, vbox
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


if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download

WIDTH_PX = 208
RAIL_PX = 64
RAIL_BELOW_PX = 860
"""Below this window width, at the standard font size, the sidebar shows icons only."""
MARGIN_PX, RAIL_MARGIN_PX = 12, 8
SHORT_PX = 480
ICON_PX = 18
LOGO_PX = 24


class DownloadsMark(QPushButton):
    """Hidden while nothing is fetched, waits or has failed; in the icon rail its tooltip says how many and how far."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("kind", "navigation")
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self._is_rail = False
        self._words = ""
        self.setIcon(icon("download", "muted"))
        self.setAccessibleName(self.tr("Downloads"))
        self.hide()

    def show_downloads(self, downloads: Sequence[Download]) -> None:
        under_way = [one for one in downloads if one.state in ("running", "waiting")]
        failed = [one for one in downloads if one.state == "failed"]
        if under_way:
            total = sum(one.total_bytes for one in under_way)
            percent = 100 * sum(one.done_bytes for one in under_way) // total if total else 0
            count = len(under_way)
            self._words = (
                self.tr("1 download, {0}%").format(percent)
                if count == 1
                else self.tr("{0} downloads, {1}%", "", count).format(count, percent)
            )
        elif failed:
            self._words = self.tr("A download stopped")
        else:
            self._words = ""
        self.setVisible(bool(self._words))
        self._show_text()

    def set_narrow(self, narrow: bool) -> None:
        self._is_rail = narrow
        self._show_text()

    def _show_text(self) -> None:
        self.setText("" if self._is_rail else f" {self._words}")
        self.setAccessibleName(self._words or self.tr("Downloads"))
        self.setToolTip(self.tr("{0}: show them").format(self._words))


class Sidebar(QWidget):
    """Becomes an icon rail in a narrow window; what the footer cannot show is in its tooltip.

    Signals: `page_chosen(str)`, the name of a page.
    """

    page_chosen = Signal(str)

    def __init__(self, pages: Sequence[PageEntry], footer: MachineFooter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("pane", "surface")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setAccessibleName(self.tr("Navigation"))
        self._pages = tuple(pages)
        self._footer = footer
        self._is_rail = False
        self._name = text_label(self, "Switchyard", role="title")
        self._head = QWidget(self)
        hbox(
            (IconMark("logo", "text", LOGO_PX, self._head), LEFT),
            (self._name, 1),
            into=self._head,
            margins=(10, 0, 0, 14),
        )

        self._column = column = vbox(self._head, into=self, margins=(MARGIN_PX, 18, MARGIN_PX, 14), gap=4)
        self._group = QButtonGroup(self)
        self._buttons: dict[str, QPushButton] = {}
        for index, page in enumerate(self._pages):
            column.addWidget(self._button(index, page))
        self.downloads = DownloadsMark(self)
        add_items(column, self.downloads, STRETCH, footer)
        self.downloads.clicked.connect(lambda: self._go(MODELS))
        self._group.idClicked.connect(lambda index: self.page_chosen.emit(self._pages[index].name))
        self._show_labels()
        self._apply()

    def follow_window(self, width: int) -> None:
        rail = width < RAIL_BELOW_PX * body_px() / BODY_PX
        if rail != self._is_rail:
            self._is_rail = rail
            self._footer.set_narrow(rail)
            self.downloads.set_narrow(rail)
            self._show_labels()
            self._apply()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._apply()

    def event(self, event: QEvent) -> bool:
        handled = super().event(event)
        if event.type() == QEvent.Type.LayoutRequest:
            self._fit()
        return handled

    def choose(self, name: str) -> None:
        self.button(name).setChecked(True)

    def has_focus(self) -> bool:
        return any(button.hasFocus() for button in self._group.buttons())

    def button(self, name: str) -> QPushButton:
        return self._buttons[name]

    def _button(self, index: int, page: PageEntry) -> QPushButton:
        button = push_button(self, checkable=True, kind="navigation")
        button.setIcon(icon(page.name, "muted", "accent_text"))
        button.setAccessibleName(page.label)
        keys = QKeySequence(f"Ctrl+{index + 1}")
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        add_shortcut(self, keys, self.tr("Go to {0}").format(page.label), lambda: self._go(page.name))
        self._group.addButton(button, index)
        self._buttons[page.name] = button
        return button

    def _go(self, name: str) -> None:
        self.choose(name)
        self.page_chosen.emit(name)

    def _show_labels(self) -> None:
        for index, page in enumerate(self._pages):
            button, label = self.button(page.name), page.label
            keys = QKeySequence(f"Ctrl+{index + 1}").toString(QKeySequence.SequenceFormat.NativeText)
            button.setText("" if self._is_rail else f" {label}")
            button.setToolTip(f"{label}  {keys}" if self._is_rail else keys)
        self._name.setVisible(not self._is_rail)

    def _fit(self) -> None:
        short = self.height() < SHORT_PX * body_px() / BODY_PX
        self._head.setVisible(not (short and self._is_rail))
        margins = self._column.contentsMargins()
        top = margins.top() + margins.bottom()
        above = [self._head] if not self._head.isHidden() else []
        mark = [self.downloads] if not self.downloads.isHidden() else []
        widgets = [*above, *self._group.buttons(), *mark]
        taken = sum(widget.sizeHint().height() + self._column.spacing() for widget in widgets)
        room = self.width() - margins.left() - margins.right()
        self._footer.fit(room, self.height() - top - taken - self._column.spacing())

    def _apply(self) -> None:
        scale = body_px() / BODY_PX
        side_px = RAIL_MARGIN_PX if self._is_rail else MARGIN_PX
        end_px = RAIL_MARGIN_PX if self._is_rail else 14
        self._column.setContentsMargins(side_px, end_px if self._is_rail else 18, side_px, end_px)
        self.setFixedWidth(round(RAIL_PX * (0.4 + 0.6 * scale) if self._is_rail else WIDTH_PX * (0.4 + 0.6 * scale)))
        side = round(ICON_PX * scale)
        for button in (*self._buttons.values(), self.downloads):
            button.setIconSize(QSize(side, side))
        self._fit()
