"""The turns of the conversation in a view that follows the end only if the reader is there; the user's among them."""

from __future__ import annotations

import html
import re
import time
from typing import Literal

from PySide6.QtCore import QEvent, QMargins, QModelIndex, QRect, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QFontMetrics, QGuiApplication, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QPushButton, QScrollArea, QSizePolicy, QWidget

from app.icons import IconButton, IconMark, icon
from app.models.conversation import ConversationModel, MessageRow
from app.models.conversation import FoldCard as Card
from app.services.answer_queue import Phase
from app.services.background import timer
from app.services.pictures import Thumbnails
from app.theme import scaled
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.attachment_row import AttachmentRow, PictureRow
from app.views.chat.composer import GrowingEdit
from app.views.chat.thought import MessageEditor, VersionSwitch
from app.views.chat.turn_column import TurnColumn
from app.widgets.answer_text.style import MOST_MATCHES, mark_format
from app.widgets.flow_layout import Flow
from app.widgets.quantities import count
from app.widgets.scaffold import STRETCH, TOP, WrappedLabel, hbox, push_button, text_label, vbox
from engine.common.plain_text import few_marks

BUBBLE_PX = 540
PADDING = QSize(16, 9)
LINE_HEIGHT = 140
BESIDE_PX = 177
"""Space kept beside a bubble for its actions."""
EDIT_BESIDE_PX = 12


class UserMessage(QWidget):
    """Signals: `resent` (the edited text), `edited` (the same, not to be sent), `rows_wanted` (its text), `deleted`,
    `version_stepped` (-1 or 1)."""

    resent = Signal(str)
    edited = Signal(str)
    rows_wanted = Signal(str)
    deleted = Signal()
    version_stepped = Signal(int)

    def __init__(self, row: MessageRow, thumbnails: Thumbnails, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._row = row
        self.editor: GrowingEdit | None = None
        self._matches: list[tuple[int, int]] = []
        """Where what is looked for stands, and which of these is shown."""
        self._match: int | None = None
        self._bubble = QFrame(self)
        self._bubble.setProperty("bubble", True)
        self._text = text_label(self._bubble)
        self._text.setTextFormat(Qt.TextFormat.RichText)
        self._text.setWordWrap(True)
        self._text.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self._inside = vbox(
            into=self._bubble, margins=(PADDING.width(), PADDING.height(), PADDING.width(), PADDING.height())
        )
        self._pictures = PictureRow(thumbnails, self._bubble)
        self._pictures.resized.connect(self._fit)
        self.attachments = AttachmentRow(self._bubble)
        self._inside.addWidget(self.attachments)
        self._inside.addWidget(self._pictures)
        self._inside.addWidget(self._text)
        self._versions = VersionSwitch(self)
        self._versions.step.connect(self.version_stepped)
        copy = IconButton("copy", self.tr("Copy"), self._copy, self)
        edit = IconButton("edit", self.tr("Edit the message"), self.start_editing, self)
        rows = IconButton("rows", self.tr("Ask this of every row of a file"), self._to_rows, self)
        delete = IconButton("trash", self.tr("Delete this message"), self.deleted.emit, self)
        self._buttons = (copy, edit, rows, delete)
        row_layout = hbox(STRETCH, into=self, gap=2)
        for button in self._buttons:
            button.is_shy = True
        for widget in (*self._buttons, self._versions):
            row_layout.addWidget(widget, 0, Qt.AlignmentFlag.AlignBottom)
        row_layout.addSpacing(6)
        row_layout.addWidget(self._bubble)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)
        self.set_row(row)

    @property
    def message_id(self) -> str:
        return self._row.message.id

    def set_row(self, row: MessageRow) -> None:
        if row.message.content != self._row.message.content:
            self._matches, self._match = [], None
        self._row = row
        self._show_text()
        self._text.setAccessibleName(self.tr("You: {0}").format(row.message.content))
        self._pictures.show_pictures(row.message.pictures)
        self.attachments.show_attachments(row.message.attachments)
        self._text.setVisible(self.editor is None and self._has_text)
        self._versions.show_version(row.version, row.versions)
        self._fit()

    def find_text(self, text: str) -> int:
        content = few_marks(self._row.message.content)
        found = re.finditer(re.escape(text), content, re.IGNORECASE) if text else ()
        matches = [match.span() for match in found][:MOST_MATCHES]
        if matches or self._matches:
            self._matches, self._match = matches, None
            self._show_text()
        return len(matches)

    def show_match(self, number: int | None) -> QRect:
        if number != self._match:
            self._match = number
            self._show_text()
        box = QRect(self._text.mapTo(self, self._text.rect().topLeft()), self._text.size())
        if number is not None and number < len(self._matches):  # about where it is in a long message
            share = self._matches[number][0] / max(len(self._row.message.content), 1)
            line = self._text.fontMetrics().lineSpacing()
            box = QRect(box.x(), box.y() + int(share * max(box.height() - line, 0)), box.width(), line)
        return box

    def _show_text(self) -> None:
        content, at, parts = few_marks(self._row.message.content), 0, []
        for number, (start, end) in enumerate(self._matches):
            look = mark_format(is_chosen=number == self._match)
            style = f"background: {look.background().color().name()}; color: {look.foreground().color().name()}"
            under = "; text-decoration: underline" if look.fontUnderline() else ""
            marked = f'<span style="{style}{under}">{html.escape(content[start:end])}</span>'
            parts += [html.escape(content[at:start]), marked]
            at = end
        text = "".join([*parts, html.escape(content[at:])])
        self._text.setText(f'<div style="white-space: pre-wrap; line-height: {LINE_HEIGHT}%">{text}</div>')

    def start_editing(self) -> None:
        if self.editor is not None:
            return
        self._text.hide()
        editor = self.editor = GrowingEdit(self._bubble)
        editor.setAccessibleName(self.tr("Edit message"))
        editor.setPlainText(self._row.message.content)
        editor.selectAll()
        editor.entered.connect(self._resend)
        editor.installEventFilter(self)
        self._inside.addWidget(editor)
        self._actions = QWidget(self._bubble)
        cancel = push_button(self._actions, self.tr("Cancel"), self.stop_editing, kind="quiet")
        save = push_button(
            self._actions, self.tr("Save"), self._save, tip=self.tr("Changes the message; the answers after it stay.")
        )
        send = push_button(self._actions, self.tr("Send as new version"), self._resend)
        hbox(STRETCH, cancel, save, send, into=self._actions, margins=(0, 6, 0, 0), gap=-1)
        self._inside.addWidget(self._actions)
        for button in self._buttons:
            button.hide()
        self._fit()
        editor.setFocus()

    def stop_editing(self) -> None:
        if self.editor is not None:
            self.editor.deleteLater()
            self.editor = None
            self._actions.deleteLater()
            self._text.setVisible(self._has_text)
            for button in self._buttons:
                button.show()
            self._fit()

    def eventFilter(self, _watched: object, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape:
            if event.type() == QEvent.Type.ShortcutOverride:
                event.accept()
                return True
            if event.type() == QEvent.Type.KeyPress:
                self.stop_editing()
                return True
        return False

    def minimumSizeHint(self) -> QSize:
        # The bubble has a fixed width, but the window may become narrower; the bubble then follows.
        return QSize(0, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def event(self, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.HoverEnter, QEvent.Type.HoverLeave):
            for button in self._buttons:
                button.update()
        return super().event(event)

    def _resend(self) -> None:
        if self.editor is not None:
            text = self.editor.toPlainText()
            if text.strip() or self._row.message.pictures or self._row.message.attachments:
                self.stop_editing()
                self.resent.emit(text)

    @property
    def _has_text(self) -> bool:
        message = self._row.message
        return bool(message.content) or not (message.pictures or message.attachments)

    def _save(self) -> None:
        if self.editor is not None:
            text = self.editor.toPlainText()
            self.stop_editing()
            self.edited.emit(text)

    def _to_rows(self) -> None:
        self.rows_wanted.emit(self._row.message.content)

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self._row.message.content)

    def _fit(self) -> None:
        widest = scaled(BUBBLE_PX)
        if self.editor is not None:
            width = min(widest, max(self.width() - EDIT_BESIDE_PX, 120))
            self._bubble.setFixedWidth(width)
            self._fit_pictures(width - 2 * PADDING.width())
            return
        most = min(widest, max(self.width() - BESIDE_PX, 120))
        metrics = QFontMetrics(self._text.font())
        # Qt puts a line's extra height below its text: move half of it above.
        lift = round(metrics.height() * (LINE_HEIGHT - 100) / 200)
        self._inside.setContentsMargins(
            PADDING.width(), PADDING.height() + lift, PADDING.width(), PADDING.height() - lift
        )
        room = most - 2 * PADDING.width()
        longest = max(
            (metrics.horizontalAdvance(line[:2000]) for line in self._row.message.content.split("\n")), default=0
        )
        width = max(min(longest + 3, room), self._pictures.widest(room), self.attachments.widest(room))
        self._fit_pictures(width)
        self._bubble.setFixedWidth(width + 2 * PADDING.width())
        self._text.setMinimumHeight(0)  # or the minimum would bound heightForWidth from below
        self._text.setFixedHeight(max(self._text.heightForWidth(width), metrics.lineSpacing()))

    def _fit_pictures(self, width: int) -> None:
        for row in (self._pictures, self.attachments):
            if not row.isHidden():
                row.setFixedHeight(row.heightForWidth(width))


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
