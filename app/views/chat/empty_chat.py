"""Shown in an empty chat: what to do first, and a few questions that a small model can answer."""

from __future__ import annotations

from PySide6.QtCore import QRect, QSize, Qt, Signal
from PySide6.QtGui import QPaintEvent, QResizeEvent
from PySide6.QtWidgets import (
    QGridLayout,
    QPushButton,
    QSizePolicy,
    QStyle,
    QStyleOptionButton,
    QStylePainter,
    QWidget,
)

from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import BatchRun
from app.widgets.chip import Dot, ElidedLabel
from app.widgets.quantities import percent
from app.widgets.scaffold import CENTRE, PageBody, hbox, push_button, text_label, vbox
from engine.common.errors import ErrorCode
from engine.protocol import BatchFinished, BatchProgress, Failed


class BatchHint(QWidget):
    """Follows the engine; visible only while a job runs, or stays paused because the engine stopped.

    Signals: `opened`, to show the job.
    """

    opened = Signal()

    def __init__(self, client: EngineClient, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._client = client
        self._is_running = False
        self._share: float | None = None
        self._is_left = False
        self._dot = Dot(self, "cpu")
        self._words = ElidedLabel(self, role="secondary")
        self.button = push_button(self, self.tr("Show job"), self._on_opened, kind="quiet")
        self.button.setProperty("compact", "true")
        hbox(self._dot, (self._words, 1), self.button, into=self, margins=(4, 0, 0, 4))
        client.batch_began.connect(self._follow)
        client.state_changed.connect(self._refresh)
        self.hide()

    @property
    def text(self) -> str:
        return self._words.full_text

    def _follow(self, run: BatchRun) -> None:
        run.progressed.connect(self._on_progressed)
        run.finished.connect(self._on_finished)

    def _on_progressed(self, event: BatchProgress) -> None:
        self._is_running, self._is_left = True, False
        self._share = min(1.0, event.pace.done / event.pace.total) if event.pace.total else None
        self._refresh()

    def _on_finished(self, event: BatchFinished | Failed) -> None:
        was_running, self._is_running = self._is_running, False
        if was_running:
            self._is_left = isinstance(event, Failed) and event.code is ErrorCode.ENGINE_DIED
            self._refresh()

    def _on_opened(self) -> None:
        self._is_left = False
        self._refresh()
        self.opened.emit()

    def _refresh(self, *_: object) -> None:
        self.setVisible(self._is_running or self._is_left)
        if self._is_left:
            self._words.set_full_text(
                self.tr("The engine stopped, so the batch job is paused; no answered row is lost.")
            )
        if not self._is_running:
            return
        share = "" if self._share is None else f" ({percent(self._share)})"
        if self._client.state is EngineState.BUSY:
            words = self.tr(
                "The batch job{0} shares the engine with your chat: both are slower until the answer is complete."
            )
        else:
            words = self.tr("A batch job is running{0}. Your chats share the engine with it and come first.")
        self._words.set_full_text(words.format(share))


PADDING = QSize(17, 13)
"""Padding around a card's text, border included, as in the style sheet."""

SIDE_PX = 24
WIDEST_PX = 744 + 2 * SIDE_PX
GAP_PX = 10


class ExampleCard(QPushButton):
    def __init__(self, text: str, parent: QWidget) -> None:
        super().__init__(text, parent)
        self.setProperty("example", True)
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)

    def sizeHint(self) -> QSize:
        width = self.fontMetrics().horizontalAdvance(self.text()) + 2 * PADDING.width() + 4
        return QSize(width, self.heightForWidth(width))

    def minimumSizeHint(self) -> QSize:
        return QSize(8 * self.fontMetrics().averageCharWidth() + 2 * PADDING.width(), self.sizeHint().height())

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        room = QRect(0, 0, width - 2 * PADDING.width(), 10_000)
        flags = Qt.TextFlag.TextWordWrap | Qt.AlignmentFlag.AlignLeft
        return self.fontMetrics().boundingRect(room, flags, self.text()).height() + 2 * PADDING.height()

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter, option = QStylePainter(self), QStyleOptionButton()
        self.initStyleOption(option)
        text, option.text = option.text, ""
        painter.drawControl(QStyle.ControlElement.CE_PushButton, option)
        room = self.rect().adjusted(PADDING.width(), 0, -PADDING.width(), 0)
        flags = Qt.TextFlag.TextWordWrap | Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        painter.setPen(self.palette().buttonText().color())
        painter.drawText(room, flags, text)


class EmptyChat(PageBody):
    """Scrolls if the window is too small.

    Signals: `example_chosen`, the text of an example; `model_wanted`: no model is loaded, and the user wants one.
    """

    example_chosen = Signal(str)
    model_wanted = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent, widest_px=WIDEST_PX, margins=(SIDE_PX, 12, SIDE_PX, 12), gap=6, above=2, below=3)
        inside = self.inside
        self._greeting = text_label(inside, self.tr("Ask something to begin"), wrap=True, align=CENTRE)
        self._greeting.setObjectName("greeting")
        self._hint = text_label(inside, role="secondary", wrap=True, align=CENTRE)
        self.choose_button = push_button(inside, self.tr("Choose a model"), self.model_wanted)
        self.choose_button.hide()
        self.examples = [ExampleCard(text, inside) for text in self._texts()]
        for button in self.examples:
            button.clicked.connect(lambda _=False, button=button: self.example_chosen.emit(button.text()))
        self._grid = QGridLayout()
        self._grid.setSpacing(GAP_PX)
        self._columns = 0
        parts = vbox(self._greeting, 6, self._hint, 6, (self.choose_button, CENTRE), 16, self._grid, gap=-1)
        self.column.insertLayout(1, parts)
        self._arrange()

    def set_hint(self, text: str, *, offer_models: bool = False) -> None:
        self._hint.setText(text)
        self.choose_button.setVisible(offer_models)

    @property
    def hint(self) -> str:
        return self._hint.text()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange()

    def _arrange(self) -> None:
        room = min(self.viewport().width(), self.inside.maximumWidth()) - 2 * SIDE_PX
        widest = max(button.sizeHint().width() for button in self.examples)
        columns = 2 if room >= 2 * widest + GAP_PX else 1
        if columns != self._columns:
            self._columns = columns
            for number, button in enumerate(self.examples):
                self._grid.addWidget(button, number // columns, number % columns)

    def _texts(self) -> tuple[str, ...]:
        # Tested many times with the starter model and the default sampling: it always answers these well.
        return (
            self.tr("What is the capital of France? Answer in one sentence."),
            self.tr("Write one sentence about the sea."),
            self.tr("Why should we drink water? Answer in one sentence."),
            self.tr("Why do people like music? Answer in one sentence."),
        )
