"""The turns of the conversation in a view that follows the end only if the reader is there."""

from __future__ import annotations

import time
from typing import Literal

from PySide6.QtCore import QEvent, QMargins, QModelIndex, QRect, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QPushButton, QScrollArea, QSizePolicy, QWidget

from app.icons import IconMark, icon
from app.models.conversation import ConversationModel, MessageRow
from app.models.conversation import FoldCard as Card
from app.services.answer_queue import Phase
from app.services.background import timer
from app.services.pictures import Thumbnails
from app.theme import scaled
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.thought import MessageEditor
from app.views.chat.turn_column import TurnColumn
from app.views.chat.user_message import UserMessage
from app.widgets.flow_layout import Flow
from app.widgets.quantities import count
from app.widgets.scaffold import TOP, WrappedLabel, hbox, push_button, text_label, vbox

CARD_PX = 680

FoldAction = Literal["show", "hide", "unfold", "again"]


class FoldCard(QFrame):
    """Signals: `acted` (a `FoldAction`), `rewritten` (another summary)."""

    acted = Signal(str)
    rewritten = Signal(str)

    def __init__(self, row: MessageRow, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self._row = row
        self.editor: MessageEditor | None = None
        self._title = text_label(self, role="heading", wrap=True)
        head = hbox((IconMark("fold", "muted", 18, self), TOP), (self._title, 1))
        self.summary = WrappedLabel("", self)
        self.note = WrappedLabel("", self, role="secondary")
        self.show_button = self._button("", self._toggle)
        self.edit_button = self._button(self.tr("Edit the summary"), self.start_editing)
        self.again_button = self._button(self.tr("Summarise again"), lambda: self.acted.emit("again"))
        self.unfold_button = self._button(self.tr("Send the turns again"), lambda: self.acted.emit("unfold"))
        self.unfold_button.setToolTip(self.tr("The model reads the turns themselves again, as far as they fit."))
        self._actions = Flow(
            self.show_button, self.edit_button, self.again_button, self.unfold_button, parent=self, gap=4
        )
        self._column = vbox(head, self.summary, self.note, self._actions, into=self, margins=(16, 12, 12, 10))
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self._set_width()
        self.set_row(row)

    @property
    def message_id(self) -> str:
        return self._row.message.id

    @property
    def title(self) -> str:
        return self._title.text()

    def set_row(self, row: MessageRow) -> None:
        self._row = row
        card = row.card
        assert card is not None
        summary = card.fold.summary
        self._title.setText(self._heading(card))
        self.setAccessibleName(f"{self._title.text()}. {summary}")
        self.summary.setText(summary)
        self.summary.setVisible(bool(summary) and self.editor is None)
        self.note.setText(self._note(card))
        self.show_button.setText(self.tr("Hide the turns") if card.is_open else self.tr("Show the turns"))
        self.show_button.setVisible(card.turns > 0)
        self.edit_button.setText(self.tr("Edit the summary") if summary else self.tr("Write a summary"))
        self.again_button.setVisible(card.is_outdated)

    def find_text(self, text: str) -> int:  # noqa: ARG002
        """See `Findable`; a summary is not searched, what it stands for is."""
        return 0

    def show_match(self, number: int | None) -> QRect:  # noqa: ARG002
        return self.rect()

    def start_editing(self) -> None:
        card = self._row.card
        if self.editor is not None or card is None:
            return
        editor = self.editor = MessageEditor(card.fold.summary, self.tr("Summary of the earlier turns"), self)
        editor.saved.connect(self._on_saved)
        editor.cancelled.connect(self.stop_editing)
        self.summary.hide()
        self._actions.hide()
        self._column.insertWidget(2, editor)
        editor.box.setFocus()

    def stop_editing(self) -> None:
        if self.editor is not None:
            self.editor.hide()
            self.editor.deleteLater()
            self.editor = None
            self._actions.show()
            self.set_row(self._row)
            self.edit_button.setFocus()

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._set_width()

    def _on_saved(self, text: str) -> None:
        self.stop_editing()
        self.rewritten.emit(text)

    def _toggle(self) -> None:
        card = self._row.card
        self.acted.emit("hide" if card is not None and card.is_open else "show")

    def _heading(self, card: Card) -> str:
        if card.fold.summary:
            one, more = self.tr("Summary of one earlier turn"), self.tr("Summary of {0} earlier turns", "", card.turns)
        else:
            one, more = (
                self.tr("One earlier turn is left out"),
                self.tr("{0} earlier turns are left out", "", card.turns),
            )
        return one if card.turns == 1 else more.format(count(card.turns))

    def _note(self, card: Card) -> str:
        if card.is_outdated:
            return self.tr("These turns were changed since the summary was made.")
        if not card.fold.summary:
            return self.tr("The model reads nothing of them. They are kept, and can be sent again.")
        by = card.fold.model or self.tr("you")
        return self.tr("The model reads this instead of the turns, which are kept. Written by {0}.").format(by)

    def _button(self, text: str, do: object) -> QPushButton:
        button = push_button(self, text, kind="quiet")
        button.setProperty("compact", "true")
        button.clicked.connect(lambda: do())  # type: ignore[operator]
        return button

    def _set_width(self) -> None:
        self.setMaximumWidth(scaled(CARD_PX))


COLUMN_PX = 744
"""Maximum width of the transcript and the composer, at the standard font size."""

TURN_GAP = 20
NEAR_END_PX = 24
SLICE_S = 0.012
"""Time slice for creating widgets of a long conversation, last turns first."""

Turn = UserMessage | AnswerMessage | FoldCard


class Transcript(QScrollArea):
    """Shows a `ConversationModel`.

    Signals:
        acted: id of an answer, and an `Action`.
        resent: id of a user's message, and its edited text.
        edited: id of a message, and another text for it, not to be sent.
        fold_acted: id of the last folded message, and a `FoldAction`.
        rewritten: the same, and another summary.
        version_stepped: id of a message, and -1 or 1.
        rows_wanted: the text of a user's message, to be asked of every row of a file.
        link_activated: a link in an answer.
        source_opened: a `Source` of an answer.
        decided: ids of an answer and of a call in it, and a `Permission`.
        attachment_opened: an `Attachment` of a message.
    """

    acted = Signal(str, str)
    resent = Signal(str, str)
    edited = Signal(str, str)
    fold_acted = Signal(str, str)
    rewritten = Signal(str, str)
    version_stepped = Signal(str, int)
    rows_wanted = Signal(str)
    link_activated = Signal(QUrl)
    source_opened = Signal(object)
    decided = Signal(str, str, str)
    attachment_opened = Signal(object)

    def __init__(self, model: ConversationModel, thumbnails: Thumbnails, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model = model
        self._thumbnails = thumbnails
        self._turns: list[Turn] = []
        self._unbuilt: list[MessageRow] = []
        self.is_at_end = True
        self._engine_is_down = False
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Conversation"))
        self._column = TurnColumn(self, TURN_GAP)
        self.setWidget(self._column)
        self._jump = push_button(self, do=self.jump_to_end)
        self._jump.setObjectName("jumpToLatest")
        self._jump.setIcon(icon("chevron-down"))
        self._jump.setFixedSize(QSize(32, 32))
        self._jump.setToolTip(self.tr("Jump to the latest"))
        self._jump.setAccessibleName(self.tr("Jump to the latest"))
        self._jump.hide()
        self._build = timer(self, self._build_some, 0, once=True)
        bar = self.verticalScrollBar()
        bar.rangeChanged.connect(self._on_range)
        bar.valueChanged.connect(self._on_scrolled)
        bar.actionTriggered.connect(lambda _action: self._release())  # by people, in whatever way
        model.modelReset.connect(self._on_reset)
        model.rowsInserted.connect(self._on_inserted)
        model.rowsRemoved.connect(self._on_removed)
        model.dataChanged.connect(self._on_changed)
        self._set_margins()

    # --- for the page ---

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def turn(self, message_id: str) -> Turn | None:
        return next((turn for turn in reversed(self._turns) if turn.message_id == message_id), None)

    def set_phase(self, message_id: str, phase: Phase | None) -> None:
        turn = self.turn(message_id)
        if isinstance(turn, AnswerMessage):
            turn.set_phase(phase)

    def set_engine_down(self, down: bool) -> None:
        self._engine_is_down = down
        for turn in self._turns:
            if isinstance(turn, AnswerMessage):
                turn.set_engine_down(down)

    def jump_to_end(self) -> None:
        self.is_at_end, self._held = True, None
        bar = self.verticalScrollBar()
        bar.setValue(bar.maximum())
        self._show_jump()

    def show_message(self, message_id: str) -> None:
        self.build_all()
        turn = self.turn(message_id)
        if turn is not None:
            self.is_at_end = False
            QTimer.singleShot(0, turn, lambda: self.ensureWidgetVisible(turn, 0, 80))

    def built(self, message_id: str) -> Turn | None:
        if self.turn(message_id) is None:
            self.build_all()
        return self.turn(message_id)

    def show_place(self, turn: Turn, place: QRect) -> None:
        self.is_at_end, self._held = False, (turn, place)
        self._column.place()
        self._show_held()
        self._show_jump()

    def _show_held(self) -> None:
        """Above what is shown, long answers are still being laid out, and move it."""
        if self._held is None:
            return
        turn, place = self._held
        at = turn.mapTo(self._column, place.center())
        self.ensureVisible(at.x(), at.y(), 0, min(120, self.viewport().height() // 3))

    def _release(self) -> None:
        self._held = None

    _held: tuple[Turn, QRect] | None = None

    def build_all(self) -> None:
        while self._unbuilt:
            self._insert(0, self._unbuilt.pop())
        self._build.stop()

    # --- the model ---

    def _on_reset(self) -> None:
        self._build.stop()
        for turn in self._turns:
            self._discard(turn)
        self._turns.clear()
        self.is_at_end = True
        self._unbuilt = list(self._model.rows)
        self._build_some()
        self._show_jump()

    def _on_inserted(self, _parent: QModelIndex, first: int, last: int) -> None:
        self.build_all()
        for number in range(first, last + 1):
            self._insert(number, self._model.row(number))
        self._column.place()  # so that the first paint does not show widgets of size zero

    def _on_removed(self, _parent: QModelIndex, first: int, last: int) -> None:
        self.build_all()
        for turn in self._turns[first : last + 1]:
            self._discard(turn)
        del self._turns[first : last + 1]

    def _on_changed(self, first: QModelIndex, last: QModelIndex) -> None:
        unbuilt = len(self._unbuilt)  # how many of the first turns
        for number in range(first.row(), last.row() + 1):
            row = self._model.row(number)
            if number < unbuilt:
                self._unbuilt[number] = row
            else:
                self._turns[number - unbuilt].set_row(row)

    def _build_some(self) -> None:
        until = time.perf_counter() + SLICE_S
        while self._unbuilt and time.perf_counter() < until:
            self._insert(0, self._unbuilt.pop())
        if self._unbuilt:
            self._build.start()

    def _insert(self, number: int, row: MessageRow) -> None:
        turn: Turn
        message = row.message
        if row.card is not None:
            turn = card = FoldCard(row, self._column)
            card.acted.connect(lambda action: self._act_on(card, action))
            card.rewritten.connect(lambda text: self.rewritten.emit(card.message_id, text))
            self._put(number, card)
            return
        if message.role == "user":
            turn = UserMessage(row, self._thumbnails, self._column)
            turn.resent.connect(lambda text: self.resent.emit(message.id, text))
            turn.attachments.opened.connect(self.attachment_opened)
            turn.deleted.connect(lambda: self.acted.emit(message.id, "delete"))
            turn.rows_wanted.connect(self.rows_wanted)
        else:
            turn = AnswerMessage(row, self._column)
            turn.acted.connect(lambda action: self.acted.emit(message.id, action))
            turn.link_activated.connect(self.link_activated)
            turn.source_opened.connect(self.source_opened)
            turn.decided.connect(lambda call, answer: self.decided.emit(message.id, call, answer))
            turn.set_engine_down(self._engine_is_down)
        turn.edited.connect(lambda text: self.edited.emit(message.id, text))
        turn.version_stepped.connect(lambda step: self.version_stepped.emit(message.id, step))
        self._put(number, turn)

    def _act_on(self, card: FoldCard, action: str) -> None:
        self.is_at_end = False  # the card stays in view, whatever is shown below it
        self.fold_acted.emit(card.message_id, action)

    def _put(self, number: int, turn: Turn) -> None:
        self._turns.insert(number, turn)
        self._column.insert(number, turn)

    def _discard(self, turn: Turn) -> None:
        if self._held is not None and self._held[0] is turn:
            self._held = None
        self._column.remove(turn)
        turn.deleteLater()

    # --- scrolling ---

    def _on_range(self, _least: int, most: int) -> None:
        if self._held is not None:
            self._show_held()
        elif self.is_at_end:
            self.verticalScrollBar().setValue(most)
        self._show_jump()

    def _on_scrolled(self, value: int) -> None:
        self.is_at_end = value >= self.verticalScrollBar().maximum() - NEAR_END_PX
        self._show_jump()

    def _show_jump(self) -> None:
        self._jump.setVisible(not self.is_at_end)
        self._jump.move((self.viewport().width() - 32) // 2, self.viewport().height() - 44)
        self._jump.raise_()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._set_margins()
        self._show_jump()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._set_margins()

    def _set_margins(self) -> None:
        # Centred in the full width, scroll bar included, so that it lines up with the composer.
        width = min(scaled(COLUMN_PX), self.width() - 48)
        side = max((self.width() - width) // 2, 24)
        right = max(side - (self.width() - self.viewport().width()), 8)
        self._column.set_margins(QMargins(side, 26, right, 20))
