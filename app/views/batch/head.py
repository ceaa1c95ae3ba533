"""The top of the page: which job is shown and its actions, and the other jobs."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QModelIndex, QPersistentModelIndex, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFont, QFontMetrics, QKeyEvent, QPainter, QPainterPath
from PySide6.QtWidgets import (
    QAbstractItemView,
    QListView,
    QMenu,
    QPushButton,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.models.batch_rows import JOB_ROLE, JobListModel
from app.services.batch_job import RESUMABLE, JobEntry, JobState
from app.theme import ColourName, scaled, themed
from app.views.batch.phrases import state_text
from app.widgets.chip import ElidedLabel
from app.widgets.scaffold import PageHeader, push_button, set_message, text_label

Index = QModelIndex | QPersistentModelIndex
WIDTH_PX = 196
INSET = 12


class JobDelegate(QStyledItemDelegate):
    """A card of two lines: the input's name, and the state with a thin bar below."""

    def sizeHint(self, _option: QStyleOptionViewItem, _index: Index) -> QSize:
        lines = QFontMetrics(self._font(13)).lineSpacing() + QFontMetrics(self._font(12)).lineSpacing()
        return QSize(scaled(WIDTH_PX), lines + 20)

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
