"""The Batch page: drop a file, get a file. Above it: which job is shown, and the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QEvent, QModelIndex, QObject, QPersistentModelIndex, QRect, QRectF, QSize, Qt, QUrl, Signal
from PySide6.QtGui import (
    QDesktopServices,
    QDragEnterEvent,
    QDragLeaveEvent,
    QDropEvent,
    QFont,
    QFontMetrics,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPainterPath,
    QShowEvent,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QListView,
    QMenu,
    QPushButton,
    QStackedWidget,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.icons import IconMark
from app.models.batch_rows import JOB_ROLE, JobListModel
from app.services.batch_input import can_be_read
from app.services.batch_job import RESUMABLE, UNDER_WAY, JobEntry, JobState, key_of
from app.services.batch_jobs import BatchJobs
from app.services.batch_sample import BatchSample
from app.services.engine_client import EngineClient
from app.theme import ColourName, scaled, set_look, themed
from app.views.batch.job_view import JobView
from app.views.batch.new_job import NewJob
from app.views.batch.phrases import job_text, state_text, translate
from app.widgets.asking import ask, ask_path, ask_paths, before_loading
from app.widgets.banner import Banner, Toast
from app.widgets.chip import ElidedLabel
from app.widgets.fields import dropped_model
from app.widgets.page import BatchDraft, Page, add_shortcut
from app.widgets.quantities import count
from app.widgets.scaffold import CENTRE, STRETCH, PageBody, PageHeader, hbox, push_button, set_message, text_label, vbox
from engine.batch_files.opening import INPUT_SUFFIXES
from engine.common.config import BatchJob, BatchStart
from engine.common.errors import ErrorCode
from engine.protocol import Failed

ICON_PX = 36
WIDTH_PX = 620


class EmptyBatch(PageBody):
    """Scrolls if the window is too small.

    Signals: `file_wanted`, `folder_wanted`: to choose one.
    """

    file_wanted = Signal()
    folder_wanted = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent, widest_px=WIDTH_PX + 40, margins=20, above=2, below=3)
        self._area = QFrame(self.inside)
        self._area.setObjectName("dropArea")
        said = self.tr("Every row is answered, many at a time. The result file keeps the input's columns.")
        kinds = self.tr(
            "Accepted: csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html, a folder of such files, "
            "and OpenAI batch files."
        )
        self.choose = push_button(self._area, self.tr("Choose a file…"), self.file_wanted, kind="primary")
        self.choose_folder = push_button(self._area, self.tr("Choose a folder…"), self.folder_wanted)
        vbox(
            (IconMark("batch", "muted", ICON_PX, self._area), CENTRE),
            text_label(self._area, self.tr("Drop a file of prompts here"), role="title", align=CENTRE),
            text_label(self._area, said, role="lead", wrap=True, align=CENTRE),
            10,
            hbox(STRETCH, self.choose, self.choose_folder, STRETCH, gap=12),
            10,
            text_label(self._area, kinds, role="secondary", wrap=True, align=CENTRE),
            into=self._area,
            margins=(32, 40, 32, 40),
            gap=10,
        )
        self.column.insertWidget(1, self._area)

    def set_over(self, over: bool) -> None:
        set_look(self._area, "over", "true" if over else "false")


class RunningJobGuard(QObject):
    """Asks when the user closes the window; does not hold up a system shutdown."""

    def __init__(self, jobs: BatchJobs, parent: QWidget) -> None:
        super().__init__(parent)
        self._jobs = jobs
        self._page = parent
        self._window: QWidget | None = None
        self._is_leaving = False

    def watch(self, window: QWidget) -> None:
        if window is not self._window and window is not self._page:
            self._window = window
            window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        by_hand = event.type() == QEvent.Type.Close and event.spontaneous()
        if watched is self._window and by_hand and not self._is_leaving and self._jobs.running:
            event.ignore()
            running = len(self._jobs.running)
            question, words, choice = (
                self.tr("A batch job is running."),
                self.tr("It stops with the window. No answered row is lost: you can resume it at the next start."),
                self.tr("Stop it and close"),
            )
            if running > 1:
                question, words, choice = (
                    self.tr("{0} batch jobs are running.", "", running).format(running),
                    self.tr(
                        "They stop with the window. No answered row is lost: you can resume them at the next start."
                    ),
                    self.tr("Stop them and close"),
                )
            ask(
                self._window or self._page,
                question,
                words,
                [(choice, "do", self._leave)],
                self.tr("Keep the window open"),
            )
            return True
        return False

    def _leave(self) -> None:
        self._is_leaving = True
        if self._window is not None:
            self._window.close()


class BatchPage(Page):
    def __init__(
        self,
        client: EngineClient,
        jobs: BatchJobs,
        sample: BatchSample,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._jobs = client, jobs
        self._shown = ""
        self._more: list[Path] = []
        self.setAcceptDrops(True)
        self.setAccessibleName(self.tr("Batch"))
        self.model = JobListModel(job_text, self)
        self.head = BatchHead(self)
        self.strip = JobStrip(self.model, self)
        self.trouble = Banner("warning", self)
        self.trouble.add_action(self.tr("Dismiss"), self.trouble.hide, kind="quiet")
        self.handed = Banner("info", self)
        self.empty = EmptyBatch(self)
        self.guard = RunningJobGuard(jobs, self)
        self.form = NewJob(client, sample, self)
        self.job_view = JobView(self)
        self.pages = QStackedWidget(self)
        for page in (self.empty, self.form, self.job_view):
            self.pages.addWidget(page)
        self.toast = Toast(self)
        self.lay_out(self.head, self.strip, self.trouble, self.handed, body=self.pages, foot=self.toast)
        self._connect()
        for entry in jobs.entries:
            self.model.put(entry)
        self._go_home()
        jobs.list_again()

    def add_strip(self, make: Callable[[QWidget], QWidget]) -> None:
        self.job_view.progress.add_strip(make)

    def take_draft(self, draft: BatchDraft) -> None:
        is_open = self.pages.currentWidget() is self.form
        self.form.take_draft(draft)
        if not is_open:
            self._shown = ""
            self.strip.choose("")
            self.pages.setCurrentWidget(self.empty)
            self._show_head()
            self.handed.show_text(
                self.tr("Your chat's prompt is ready: choose the file whose rows it is to be asked of.")
            )
            self.empty.choose.setFocus()

    # --- files --------------------------------------------------------------------------------------

    def open_files(self, paths: list[Path]) -> None:
        good = [path for path in paths if can_be_read(path)]
        if not good:
            name = paths[0].name if paths else ""
            self.trouble.show_text(
                self.tr(
                    "{0} has an unsupported file type: use txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx or html, "
                    "or a folder of such files."
                ).format(name)
            )
            return
        self.trouble.hide()
        self._more = good[1:]
        self._show_form(good[0])

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        # A model is left to the window, which loads it.
        if dropped_model(event.mimeData()) is None and any(url.isLocalFile() for url in event.mimeData().urls()):
            event.acceptProposedAction()
            self.empty.set_over(True)

    def dragLeaveEvent(self, _event: QDragLeaveEvent) -> None:
        self.empty.set_over(False)

    def dropEvent(self, event: QDropEvent) -> None:
        self.empty.set_over(False)
        paths = [Path(url.toLocalFile()) for url in event.mimeData().urls() if url.isLocalFile()]
        if paths:
            event.acceptProposedAction()
            self.open_files(paths)

    @property
    def is_in_use(self) -> bool:
        return self.pages.currentWidget() is self.form

    def take_over(self, before: Page) -> None:
        if isinstance(before, BatchPage) and before._shown:
            self.show_job(before._shown)

    def close_down(self) -> None:
        self.form.close_down()
        self.job_view.close_down()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.guard.watch(self.window())

    # --- what is shown --------------------------------------------------------------------------------

    def show_job(self, key: str) -> None:
        entry = self._jobs.entry(key)
        if entry is None:
            return
        self._shown = key
        self.strip.choose(key)
        self.job_view.show_job(entry)
        self.pages.setCurrentWidget(self.job_view)
        self._show_head()

    def _show_form(self, path: Path) -> None:
        self.handed.hide()
        self._shown = ""
        self.strip.choose("")
        self.form.open(path)
        self.pages.setCurrentWidget(self.form)
        self._show_head()
        self.form.input.change.setFocus()

    def _go_home(self) -> None:
        entries = [*self._jobs.running, *self._jobs.entries]
        if entries:
            self.show_job(entries[0].key)
        else:
            self._shown = ""
            self.pages.setCurrentWidget(self.empty)
            self._show_head()

    def _show_head(self) -> None:
        on_form = self.pages.currentWidget() is self.form
        self.strip.setVisible(self.model.rowCount() > (0 if on_form else 1))  # the header already names a single job
        entry = self._jobs.entry(self._shown)
        more = len(self._more)
        waiting = sum(one.state is JobState.QUEUED for one in self._jobs.entries)
        empty = entry is None and not on_form
        self.head.show_job(entry if not on_form else None, on_form=on_form, empty=empty, waiting=waiting)
        self.head.show_more(self.tr("{0} more after this one", "", more).format(more) if on_form and more else "")

    # --- jobs -----------------------------------------------------------------------------------------

    def _start(self, job: BatchJob, total: int | None) -> None:
        other = self._jobs.entry(key_of(job.output))
        if other is not None and (other.state in UNDER_WAY or other.state is JobState.QUEUED):
            name = Path(job.output).name
            self.form.refuse(self.tr("Another job is writing {0}: choose another result file.").format(name))
            return
        key = self._jobs.add(job, total)
        if self._more:
            self._show_form(self._more.pop(0))
        else:
            self.show_job(key)
            self.head.pause.setFocus()  # the button that had the focus is gone

    def _ask_replace(self, job: BatchJob, total: int | None) -> None:
        ask(
            self,
            self.tr("{0} already exists.").format(Path(job.output).name),
            self.tr("Replacing it deletes the answers in it. To keep them, choose another name."),
            [(self.tr("Replace it"), "destroy", lambda: self._start(replace(job, start="restart"), total))],
            self.tr("Back"),
        )

    def _leave_form(self) -> None:
        self._more = []
        self.form.leave()
        self._go_home()

    def _on_job_changed(self, entry: JobEntry) -> None:
        new = self.model.row_of(entry.key) < 0
        self.model.put(entry)
        if entry.key == self._shown:
            self.job_view.show_job(entry)
            self._show_head()
        elif new and self.pages.currentWidget() is self.empty:
            self._go_home()
        elif new or entry.state is JobState.QUEUED:
            self._show_head()

    def _on_listed(self) -> None:
        if self.pages.currentWidget() is not self.form and self._shown not in (e.key for e in self._jobs.entries):
            self._go_home()

    def _remove(self, key: str) -> None:
        entry = self._jobs.entry(key)
        if entry is None:
            return
        if entry.state in UNDER_WAY:
            self.toast.show_text(self.tr("Pause the job before you remove it from the list."))
            return
        self._jobs.empty_bin()
        self._jobs.remove(key)
        if self._jobs.entry(key) is None:
            self.toast.show_text(
                self.tr("{0} was removed from the list; its result file stays.").format(entry.input.name),
                self.tr("Undo"),
                lambda: self._restore(key),
            )

    def _restore(self, key: str) -> None:
        self._jobs.restore(key)
        self.show_job(key)

    def _on_removed(self, key: str) -> None:
        self.model.remove(key)
        if key == self._shown:
            self.job_view.forget()
            self._go_home()

    def _ask_restart(self, key: str) -> None:
        ask(
            self,
            self.tr("Start this job over?"),
            self.tr("Its answers are deleted, and its result file is replaced when it is done."),
            [(self.tr("Start over"), "destroy", lambda: self._jobs.resume(key, "restart"))],
        )

    def _resume(self, key: str, start: BatchStart = "resume") -> None:
        """Resumes a job; if the loaded model differs from the one it began with, asks which one to use."""
        entry, model = self._jobs.entry(key), self._client.model
        config = self._jobs.config_to_resume(key) if entry is not None else None
        if entry is None or model is None or config is None:
            self._jobs.resume(key, start)
            return

        def reload() -> None:
            self._client.load(config).finished.connect(self._on_reloaded)
            self._jobs.resume(key, start)

        begun = f"{Path(entry.begun_model).name} {entry.begun_precision}"
        now = f"{Path(model.path).name} {model.precision}"
        rows = (
            self.tr("1 row was")
            if entry.done == 1
            else self.tr("{0} rows were", "", entry.done).format(count(entry.done))
        )
        ask(
            self,
            self.tr("This job began with {0}; now {1} is loaded.").format(begun, now),
            self.tr(
                "{0} answered with the first. Load it to resume; chats then use it too. "
                "Starting over deletes those answers."
            ).format(rows),
            [
                (self.tr("Load it and resume"), "do", lambda: before_loading(self._jobs, self, reload)),
                (self.tr("Start over"), "destroy", lambda: self._jobs.resume(key, "restart")),
            ],
        )

    def _on_reloaded(self, event: object) -> None:
        if isinstance(event, Failed) and event.code is not ErrorCode.ENGINE_DIED:
            self.trouble.show_text(event.message)

    def _open_result(self, key: str, *, folder: bool) -> None:
        entry = self._jobs.entry(key)
        if entry is None:
            return
        if not entry.result_file.exists():
            words = self.tr("{0} does not exist yet: it is written when the job is done, paused or stopped.")
            self.trouble.show_text(words.format(entry.result_file.name))
            return
        place = entry.result_file.parent if folder else entry.result_file
        QDesktopServices.openUrl(QUrl.fromLocalFile(str(place)))

    # --- building ---------------------------------------------------------------------------------------

    def _connect(self) -> None:
        jobs, head = self._jobs, self.head
        jobs.changed.connect(self._on_job_changed)
        jobs.removed.connect(self._on_removed)
        jobs.answered.connect(self.job_view.add_rows)
        self.job_view.rows.redo_wanted.connect(lambda: self._resume(self._shown, "redo_cut_off"))
        jobs.listed.connect(self._on_listed)
        jobs.trouble.connect(self.trouble.show_text)
        self.strip.chosen.connect(self.show_job)
        self.strip.remove_wanted.connect(self._remove)
        for page in (self.empty, head):
            page.file_wanted.connect(self.choose_files)
        self.empty.folder_wanted.connect(self.choose_folder)
        head.folder_wanted.connect(self.choose_folder)
        self.form.file_wanted.connect(self.choose_files)
        self.form.model_wanted.connect(jobs.model_wanted)
        self.form.cancelled.connect(self._leave_form)
        self.form.start_wanted.connect(self._start)
        self.form.replace_wanted.connect(self._ask_replace)
        head.pause.clicked.connect(lambda: jobs.pause(self._shown))
        head.resume.clicked.connect(lambda: self._resume(self._shown))
        head.stop_wanted.connect(lambda: jobs.stop(self._shown))
        head.retry.clicked.connect(lambda: self._resume(self._shown, "retry_failed"))
        head.restart_wanted.connect(lambda: self._ask_restart(self._shown))
        head.moved.connect(lambda places: jobs.move(self._shown, places))
        head.remove_wanted.connect(lambda: self._remove(self._shown))
        head.open.clicked.connect(lambda: self._open_result(self._shown, folder=False))
        head.folder_shown.connect(lambda: self._open_result(self._shown, folder=True))
        add_shortcut(self, QKeySequence.StandardKey.Open, self.tr("Choose a file of prompts"), self.choose_files)

    def choose_files(self) -> None:
        words = translate("Batch", "Files of prompts")
        ask_paths(self, words, self.open_files, kinds=f"{words} ({' '.join(f'*{each}' for each in INPUT_SUFFIXES)})")

    def choose_folder(self) -> None:
        ask_path(self, self.tr("Folder of prompts"), lambda path: self.open_files([path]), folder=True)


Index = QModelIndex | QPersistentModelIndex
_FIGURE_PX = 196
INSET = 12


class JobDelegate(QStyledItemDelegate):
    """A card of two lines: the input's name, and the state with a thin bar below."""

    def sizeHint(self, _option: QStyleOptionViewItem, _index: Index) -> QSize:
        lines = QFontMetrics(self._font(13)).lineSpacing() + QFontMetrics(self._font(12)).lineSpacing()
        return QSize(scaled(_FIGURE_PX), lines + 20)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        job: JobEntry = index.data(JOB_ROLE)
        rect: QRect = option.rect
        state: QStyle.StateFlag = option.state
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        card = QPainterPath()
        card.addRoundedRect(QRectF(rect).adjusted(1, 1, -7, -1), 8, 8)
        selected = bool(state & QStyle.StateFlag.State_Selected)
        hovered = bool(state & QStyle.StateFlag.State_MouseOver)
        painter.fillPath(card, themed("accent_background" if selected else "hover" if hovered else "sunken"))
        if selected and state & QStyle.StateFlag.State_HasFocus:
            painter.setPen(themed("accent"))
            painter.drawPath(card)
        place = rect.adjusted(INSET, 7, -INSET - 6, 0)
        title = self._font(13, QFont.Weight.Medium)
        place.setHeight(QFontMetrics(title).lineSpacing())
        self._text(painter, place, job.input.name, title, "accent_text" if selected else "text")
        place.translate(0, place.height())
        bad = job.state is JobState.FAILED or bool(job.blocked)
        self._text(painter, place, self._second_line(job), self._font(12), "danger" if bad else "muted")
        if job.share is not None and job.state is not JobState.FINISHED:
            bar = QRectF(rect.x() + INSET, rect.bottom() - 6, rect.width() - 2 * INSET - 6, 3)
            painter.fillRect(bar, themed("border"))
            painter.fillRect(QRectF(bar.x(), bar.y(), bar.width() * job.share, 3), themed("accent"))
        painter.restore()

    def _second_line(self, job: JobEntry) -> str:
        text = state_text(job)
        if job.failed:
            text = f"{text} · " + self.tr("{0} failed").format(job.failed)
        return text

    def _text(self, painter: QPainter, place: QRect, text: str, font: QFont, colour: ColourName) -> None:
        painter.setFont(font)
        painter.setPen(themed(colour))
        shown = QFontMetrics(font).elidedText(text, Qt.TextElideMode.ElideMiddle, place.width())
        painter.drawText(place, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, shown)

    def _font(self, px: float, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
        parent = self.parent()
        font = QFont(parent.font().family() if isinstance(parent, QWidget) else "")
        font.setPixelSize(max(8, scaled(px)))
        font.setWeight(weight)
        return font


class JobStrip(QListView):
    """Signals: `chosen` and `remove_wanted`, the key of a job."""

    chosen = Signal(str)
    remove_wanted = Signal(str)

    def __init__(self, model: JobListModel, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("jobStrip")
        self.setAccessibleName(self.tr("Jobs"))
        self._choosing = False
        self.setFlow(QListView.Flow.LeftToRight)
        self.setWrapping(False)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)  # keys and wheel scroll; a bar is tall
        self.setMouseTracking(True)
        self.setModel(model)
        self._jobs = model
        self._delegate = JobDelegate(self)
        self.setItemDelegate(self._delegate)
        self.setViewportMargins(14, 8, 14, 6)
        self.selectionModel().currentChanged.connect(self._on_current)
        model.rowsInserted.connect(self._fit)
        self._fit()

    def choose(self, key: str) -> None:
        row = self._jobs.row_of(key)
        self._choosing = True
        if row < 0:
            self.clearSelection()
            self.setCurrentIndex(QModelIndex())
        else:
            self.setCurrentIndex(self._jobs.index(row, 0))
        self._choosing = False

    def keyPressEvent(self, event: QKeyEvent) -> None:
        job = self.currentIndex().data(JOB_ROLE)
        if event.key() == Qt.Key.Key_Delete and job is not None:
            self.remove_wanted.emit(job.key)
            return
        super().keyPressEvent(event)

    def _on_current(self, index: QModelIndex) -> None:
        job = index.data(JOB_ROLE)
        if job is not None and not self._choosing:
            self.chosen.emit(job.key)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self, *_: object) -> None:
        height = self._delegate.sizeHint(QStyleOptionViewItem(), QModelIndex()).height()
        self.setFixedHeight(height + 14 + 1)


LEAST_NAMES_PX = 180


class BatchHead(PageHeader):
    """Signals: the menus' actions; `moved` carries the number of places in the queue.

    `pause`, `resume`, `retry` and `open` are buttons.
    """

    file_wanted = Signal()
    folder_wanted = Signal()
    stop_wanted = Signal()
    restart_wanted = Signal()
    remove_wanted = Signal()
    moved = Signal(int)
    folder_shown = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.title.setText(self.tr("Batch"))
        self._names = ElidedLabel(self, role="secondary")
        self._more = text_label(self, role="secondary")
        self.set_middle(self._names, least_px=LEAST_NAMES_PX, stretch=1)
        self.add_buttons(self._more)
        self.retry = self._button(self.tr("Retry failed"))
        self.pause = self._button(self.tr("Pause"))
        self.resume = self._button(self.tr("Resume"))
        self.open = self._button(self.tr("Open result"))
        self.menu = self._button(self.tr("More"))
        self.new = self._button(self.tr("New job"))
        self.new.setProperty("kind", "primary")
        more = QMenu(self)
        self.show_folder = more.addAction(self.tr("Show in folder"), self.folder_shown.emit)
        self.stop = more.addAction(self.tr("Stop and keep answers"), self.stop_wanted.emit)
        self.restart = more.addAction(self.tr("Start over…"), self.restart_wanted.emit)
        self.earlier = more.addAction(self.tr("Move up in queue"), lambda: self.moved.emit(-1))
        self.later = more.addAction(self.tr("Move down in queue"), lambda: self.moved.emit(1))
        more.addSeparator()
        self.remove = more.addAction(self.tr("Remove from list"), self.remove_wanted.emit)
        self.menu.setMenu(more)
        kinds = QMenu(self)
        kinds.addAction(self.tr("From a file…"), self.file_wanted.emit)
        kinds.addAction(self.tr("From a folder…"), self.folder_wanted.emit)
        self.new.setMenu(kinds)

    def show_job(self, job: JobEntry | None, *, on_form: bool, empty: bool, waiting: int = 0) -> None:
        state = job.state if job is not None else None
        self._names.set_full_text(f"{job.input.name} → {job.output.name}" if job is not None else "")
        if on_form:
            self._names.set_full_text(self.tr("New job"))
        # Each has its place, whatever the job does while the pointer is over it.
        width = max(self.pause.sizeHint().width(), self.resume.sizeHint().width())
        for button in (self.pause, self.resume):
            button.setMinimumWidth(width)
        self.pause.setVisible(job is not None and state not in RESUMABLE)
        self.pause.setEnabled(state in (JobState.RUNNING, JobState.QUEUED))
        self.resume.setVisible(state in RESUMABLE)
        self.retry.setVisible(job is not None and state is JobState.FINISHED and job.failed > 0)
        written = state in (JobState.FINISHED, JobState.STOPPED, JobState.PAUSED)
        self.open.setVisible(job is not None)
        self.open.setEnabled(job is not None and written and (job.done > 0 or state is JobState.FINISHED))
        self.menu.setVisible(job is not None)
        self.new.setVisible(not on_form and not empty)
        idle = state in RESUMABLE or state is JobState.FINISHED
        self.stop.setVisible(state in (JobState.RUNNING, JobState.PAUSED, JobState.QUEUED))
        self.restart.setVisible(idle)
        turn = job.turn if job is not None else 0
        self.earlier.setVisible(turn > 1)
        self.later.setVisible(0 < turn < waiting)
        self.remove.setVisible(idle or state is JobState.QUEUED)

    def show_more(self, text: str) -> None:
        set_message(self._more, text)

    def _button(self, text: str) -> QPushButton:
        button = push_button(self, text)
        button.hide()
        self.add_buttons(button)
        return button
