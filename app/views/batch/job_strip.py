"""All jobs in one line across the page, each with its state."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QModelIndex, QPersistentModelIndex, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFont, QFontMetrics, QKeyEvent, QPainter, QPainterPath
from PySide6.QtWidgets import (
    QAbstractItemView,
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.models.jobs import JOB_ROLE, JobListModel
from app.services.batch_job import JobEntry, JobState
from app.theme import ColourName, scaled, themed
from app.views.batch.phrases import state_text

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
        """Selects the job that is shown, or none; emits nothing."""
        row = self._jobs.row_of(key)
        self._choosing = True
        if row < 0:
            self.clearSelection()
            self.setCurrentIndex(QModelIndex())
        else:
            self.setCurrentIndex(self._jobs.index(row))
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
