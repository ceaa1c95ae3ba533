"""An answer: the thought before it, its Markdown, a note on trouble, and the line of statistics and actions below."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import QEvent, QRect, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QResizeEvent, QTextCursor
from PySide6.QtWidgets import QBoxLayout, QFrame, QWidget

from app.icons import IconButton
from app.models.conversation import MessageRow
from app.services.answer_queue import CANCELLED, Phase
from app.services.chat_store import Message, MessageState
from app.services.chat_store.records import shown_sources
from app.theme import scaled, use_tabular_figures
from app.views.chat.calls import CallsView
from app.views.chat.phrases import phase_text, ran_out, stats_text, trouble_text
from app.views.chat.source_row import SourceRow, source_words
from app.views.chat.thought import MessageEditor, Thought, VersionSwitch
from app.widgets.answer_text import AnswerView
from app.widgets.answer_text.view import Match
from app.widgets.chip import ElidedLabel
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR
from app.widgets.scaffold import WrappedLabel, add_items, hbox, push_button, vbox

COPIED_MS = 1500
ANSWER_PX = 680
NARROW_PX = 440
"""Below this width the action for a failure goes under the sentence."""

Action = Literal["regenerate", "branch", "continue", "restart", "stop", "delete", "fold", "drop"]


class AnswerMessage(QWidget):
    """Signals: `acted` (an `Action`), `edited` (another text), `version_stepped` (-1 or 1), `link_activated`,
    `source_opened` (a `Source`), `decided` (see `CallsView`)."""

    acted = Signal(str)
    edited = Signal(str)
    version_stepped = Signal(int)
    link_activated = Signal(QUrl)
    source_opened = Signal(object)
    decided = Signal(str, str)

    def __init__(self, row: MessageRow, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._row = row
        self._phase: Phase | None = None
        self._engine_is_down = False
        self.note = ""
        self._matches: list[Match] = []
        self._looked_for = ""
        self.thought: Thought | None = None
        """What was thought before it, if anything was."""
        self.calls: CallsView | None = None
        """The tools that it called, if it called any."""
        self.body = AnswerView(self)
        self.body.link_activated.connect(self.link_activated)
        self.body.reference_activated.connect(self._open_reference)
        self.sources = SourceRow(self)
        self.sources.opened.connect(self.source_opened)
        self._note = self._build_note()
        self._versions = VersionSwitch(self)
        self._versions.step.connect(self.version_stepped)
        self._figures = ElidedLabel(self, role="secondary")
        use_tabular_figures(self._figures)
        self._copy = IconButton("copy", self.tr("Copy the answer"), self._copy_text, self)
        self._again = IconButton("refresh", self.tr("Answer again"), lambda: self.acted.emit("regenerate"), self)
        self._branch = IconButton("branch", self.tr("Continue in a new chat"), lambda: self.acted.emit("branch"), self)
        self._edit = IconButton("edit", self.tr("Edit the answer"), self.start_editing, self)
        self._delete = IconButton("trash", self.tr("Delete the answer"), lambda: self.acted.emit("delete"), self)
        self.editor: MessageEditor | None = None
        self._continue = push_button(
            self, self.tr("Continue"), lambda: self.acted.emit("continue"), kind="quiet", compact=True
        )
        actions = QWidget(self)
        hbox(self._copy, self._again, self._branch, self._edit, self._delete, self._continue, into=actions, gap=2)
        self._column = vbox(
            self.body, self.sources, self._note, Flow(self._versions, self._figures, actions, parent=self), into=self
        )
        self._set_width()
        self.set_row(row)

    @property
    def message_id(self) -> str:
        return self._row.message.id

    @property
    def row(self) -> MessageRow:
        return self._row

    @property
    def figures(self) -> str:
        return self._figures.full_text

    def set_row(self, row: MessageRow) -> None:
        """Show this turn; text that was only appended is appended to the view."""
        self._row = row
        message = row.message
        streaming = message.state is MessageState.STREAMING
        self._show_calls(message)
        self._show_thought(message)
        self.body.show_growing(message.content, grows=streaming)
        self.body.setVisible(bool(message.content) and self.editor is None)
        self.sources.show_sources(() if streaming or not message.content else shown_sources(message))
        if not streaming:
            self._phase = None
            self.body.set_references({source.number: source_words(source) for source in message.sources})
        self._refresh()

    def _open_reference(self, number: int) -> None:
        for source in self._row.message.sources:
            if source.number == number:
                self.source_opened.emit(source)
                return

    def start_editing(self) -> None:
        if self.editor is None:
            editor = self.editor = MessageEditor(self._row.message.content, self.tr("Edit the answer"), self)
            editor.saved.connect(self._on_saved)
            editor.cancelled.connect(self.stop_editing)
            self.body.hide()
            self._column.insertWidget(self._column.indexOf(self.body), editor)
            editor.box.setFocus()

    def stop_editing(self) -> None:
        if self.editor is not None:
            self.editor.hide()
            self.editor.deleteLater()
            self.editor = None
            self.set_row(self._row)
            self._edit.setFocus()

    def _on_saved(self, text: str) -> None:
        self.stop_editing()
        self.edited.emit(text)

    def find_text(self, text: str) -> int:
        """See `Findable`; what was thought is not searched."""
        self._matches = self.body.find_matches(text) if text or self._matches else []
        self._looked_for = text
        return len(self._matches)

    def show_match(self, number: int | None) -> QRect:
        if number is None:
            self.body.find_matches(self._looked_for)
            return self.rect()
        self.body.show_match(number)
        cursor = QTextCursor(self.body.document())
        cursor.setPosition(self._matches[number].start)
        place = self.body.cursorRect(cursor)
        return QRect(self.body.viewport().mapTo(self, place.topLeft()), place.size())

    def set_phase(self, phase: Phase | None) -> None:
        self._phase = phase
        self._refresh()

    def set_engine_down(self, down: bool) -> None:
        if down != self._engine_is_down:
            self._engine_is_down = down
            self._refresh()

    def minimumSizeHint(self) -> QSize:
        # Whatever its present width, the window may become narrower; the text then wraps again.
        return QSize(0, super().minimumSizeHint().height())

    # --- inside ---

    def _show_calls(self, message: Message) -> None:
        if message.steps and self.calls is None:
            self.calls = CallsView(self)
            self.calls.decided.connect(self.decided)
            self._column.insertWidget(0, self.calls)
        if self.calls is not None:
            self.calls.set_message(message)

    def _show_thought(self, message: Message) -> None:
        if message.reasoning and self.thought is None:
            self.thought = thought = Thought(self)
            thought.link_activated.connect(self.link_activated)
            self._column.insertWidget(self._column.indexOf(self.body), thought)
            before = self.body.previousInFocusChain()
            while before is not None and before.focusPolicy() == Qt.FocusPolicy.NoFocus:
                before = before.previousInFocusChain()
            if before is not None:
                QWidget.setTabOrder(before, thought.header)
                QWidget.setTabOrder(thought.header, thought.copy_button)
        if self.thought is not None:
            self.thought.set_message(message)

    def _build_note(self) -> QFrame:
        note = QFrame(self)
        note.setProperty("note", True)
        self._note_label = WrappedLabel("", note)
        self._restart = push_button(note, self.tr("Restart engine"), lambda: self.acted.emit("restart"))
        self._note_again = push_button(note, self.tr("Answer again"), lambda: self.acted.emit("regenerate"))
        self._note_continue = push_button(note, self.tr("Continue"), lambda: self.acted.emit("continue"))
        self._note_fold = push_button(
            note,
            self.tr("Fold earlier turns"),
            lambda: self.acted.emit("fold"),
            tip=self.tr("The model summarises them, and reads the summary instead."),
        )
        self._note_drop = push_button(note, self.tr("Leave out the oldest"), lambda: self.acted.emit("drop"))
        self._note_row = row = QBoxLayout(QBoxLayout.Direction.LeftToRight, note)
        row.setContentsMargins(12, 8, 8, 8)
        row.setSpacing(8)
        add_items(
            row,
            (self._note_label, 1),
            (self._restart, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter),
            (self._note_fold, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter),
            (self._note_drop, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter),
            (self._note_continue, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter),
            (self._note_again, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter),
        )
        return note

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._set_width()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        narrow = self.width() < scaled(NARROW_PX)
        way = QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight
        if way != self._note_row.direction():
            self._note_row.setDirection(way)

    def _refresh(self) -> None:
        message = self._row.message
        streaming = message.state is MessageState.STREAMING
        waits_for_engine = streaming and self._engine_is_down
        self.note = trouble_text(message)
        if waits_for_engine:
            self.note = self.tr("The engine is not running. Restart it to get your answer.")
        self._note.setVisible(bool(self.note))
        self._note_label.setText(self.note)
        self._restart.setVisible(self._engine_is_down)
        is_full = ran_out(message)
        self._note_fold.setVisible(is_full)
        self._note_drop.setVisible(is_full)
        self._note_again.setVisible(not self._engine_is_down and not is_full)
        self._note_continue.setVisible(not self._engine_is_down and bool(message.content) and not is_full)
        self._versions.show_version(self._row.version, self._row.versions)
        if streaming:
            self._figures.set_full_text("" if self._phase is None or waits_for_engine else phase_text(self._phase))
        else:
            unsent = self.tr("folded, not sent") if self._row.is_folded else ""
            self._figures.set_full_text(SEPARATOR.join(filter(None, (stats_text(message), unsent))))
        self._figures.setVisible(bool(self._figures.full_text))
        ended = not streaming and bool(message.content)
        self._copy.setVisible(ended)
        self._branch.setVisible(ended)
        self._edit.setVisible(ended)
        self._delete.setVisible(not streaming)
        self._again.setVisible(not streaming and (is_full or not self.note))
        limit = message.stats is not None and message.stats.finish_reason == "length"
        is_cut = limit or is_full or message.reason_code == CANCELLED
        self._continue.setVisible(bool(message.content) and is_cut)

    def _copy_text(self) -> None:
        self.body.copy_all()
        self._copy.set_icon("check", self.tr("Copied"))
        QTimer.singleShot(COPIED_MS, self, lambda: self._copy.set_icon("copy", self.tr("Copy the answer")))

    def _set_width(self) -> None:
        self.setMaximumWidth(scaled(ANSWER_PX))
