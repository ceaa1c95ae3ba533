"""An answer: the thought before it, its Markdown, a note on trouble, and the line of statistics and actions below."""

from __future__ import annotations

import json
from typing import Literal

from PySide6.QtCore import QCoreApplication, QEvent, QRect, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QFontDatabase, QResizeEvent, QTextCursor
from PySide6.QtWidgets import QBoxLayout, QFrame, QPlainTextEdit, QVBoxLayout, QWidget

from app.engine_words import said
from app.icons import ICON_PX, IconButton, icon
from app.models.conversation import MessageRow
from app.services.answer_queue import CANCELLED, Phase
from app.services.chat_store import Message, MessageState, Step, ToolUse
from app.services.chat_store.records import shown_sources
from app.theme import scaled, use_tabular_figures
from app.views.chat.attachment_row import SourceRow, source_words
from app.views.chat.phrases import phase_text, ran_out, stats_text, trouble_text
from app.views.chat.thought import MessageEditor, Thought, VersionSwitch
from app.widgets.answer_text import AnswerView
from app.widgets.answer_text.view import Match
from app.widgets.chip import ElidedLabel
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR, duration
from app.widgets.scaffold import WrappedLabel, add_items, hbox, push_button, text_label, vbox

translate = QCoreApplication.translate

MOST_LINES = 12
MOST_SHOWN = 20_000
"""Characters of a result that are shown; the model and an export have more of it."""
_LONGEST_LINE = 90
_SHORT_RESULT = 60
"""Characters of a result that stands on the folded line."""
_LONGEST_ASKED = 600


class CallsView(QWidget):
    """Signals: `decided`, a call's id and whether it may run: `once`, `chat`, `always` or `deny`."""

    decided = Signal(str, str)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._column = vbox(into=self, gap=6)
        self.rows: dict[str, CallRow] = {}
        self._texts: list[AnswerView] = []
        self._shown: tuple[Step, ...] = ()

    def set_message(self, message: Message) -> None:
        is_open = message.state is MessageState.STREAMING
        for number, step in enumerate(message.steps):
            if number >= len(self._texts):
                text = AnswerView(self)
                self._texts.append(text)
                self._column.addWidget(text)
            self._texts[number].show_growing(step.text, grows=False)
            self._texts[number].setVisible(bool(step.text.strip()))
            for use in step.calls:
                row = self.rows.get(use.id)
                if row is None:
                    row = self.rows[use.id] = CallRow(self)
                    row.decided.connect(lambda answer, id_=use.id: self.decided.emit(id_, answer))
                    self._column.addWidget(row)
                row.set_use(use, is_open=is_open)
        self.setVisible(bool(message.steps))


class CallRow(QWidget):
    """Signals: `decided`: `once`, `chat`, `always` or `deny`."""

    decided = Signal(str)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.use = ToolUse("", "")
        self.header = push_button(self, kind="fold", checkable=True)
        self.header.setIconSize(QSize(ICON_PX, ICON_PX))
        self.header.setCursor(Qt.CursorShape.PointingHandCursor)
        self.header.toggled.connect(self._show_fold)
        use_tabular_figures(self.header)
        self._summary = ElidedLabel(self, role="secondary")
        self.card: QFrame | None = None
        """The question whether it may run."""
        self._inside: QWidget | None = None
        self._column = vbox(hbox(self.header, (self._summary, 1)), into=self, gap=6)

    def set_use(self, use: ToolUse, *, is_open: bool) -> None:
        self.use = use
        self.header.setText(use.name)
        self._summary.set_full_text(SEPARATOR.join(filter(None, (state_words(use, is_open=is_open), one_line(use)))))
        self.header.setAccessibleName(f"{use.name}: {state_words(use, is_open=is_open)}")
        asks = is_open and use.state == "asked"
        if asks and self.card is None:
            self.card = self._question()
            self._column.addWidget(self.card)
        if self.card is not None and not asks:
            self.card.hide()
            self.card.deleteLater()
            self.card = None
        self._show_fold()

    def _question(self) -> QFrame:
        card = QFrame(self)
        card.setProperty("note", True)
        words = self.tr("The model wants to call {0}.").format(self.use.name)
        if self.use.server:
            words = self.tr("The model wants to call {0} of the server {1}.").format(self.use.name, self.use.server)
        asked = WrappedLabel(words, card)
        shown = pretty(self.use.arguments)
        given = text_label(card, shown if len(shown) <= _LONGEST_ASKED else f"{shown[:_LONGEST_ASKED]}…")
        given.setTextFormat(Qt.TextFormat.PlainText)
        given.setWordWrap(True)
        given.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        buttons = []
        for text, answer in (
            (self.tr("Allow once"), "once"),
            (self.tr("Allow in this chat"), "chat"),
            (self.tr("Always allow"), "always"),
            (self.tr("Deny"), "deny"),
        ):
            button = push_button(
                card,
                text,
                lambda _on, answer=answer: QTimer.singleShot(0, self, lambda: self._say(answer)),
                compact=True,
                name=f"{text}: {self.use.name}",
            )
            # Later, for an answer removes the card, and with it the button whose click this is.
            buttons.append(button)
        self.buttons = buttons
        vbox(asked, given, Flow(*buttons, parent=card), into=card, margins=(12, 10, 12, 10))
        return card

    def _say(self, answer: str) -> None:
        self.decided.emit(answer)

    def _show_fold(self) -> None:
        is_open = self.header.isChecked()
        self.header.setIcon(icon("chevron-down" if is_open else "chevron-right", "muted"))
        tip = self.tr("Fold the call") if is_open else self.tr("Show arguments and result")
        self.header.setToolTip(tip)
        state = self.tr("unfolded") if is_open else self.tr("folded")
        self.header.setAccessibleDescription(f"{state}. {tip}")
        if is_open and self._inside is None:
            self._inside = QWidget(self)
            column = vbox(into=self._inside, margins=(24, 0, 0, 4), gap=4)
            self._arguments = self._box(self.tr("Arguments"), column)
            self._result = self._box(self.tr("Result"), column)
            self._column.insertWidget(1, self._inside)
        if self._inside is not None:
            self._inside.setVisible(is_open)
            _fill(self._arguments, pretty(self.use.arguments))
            _fill(self._result, self.use.result if self.use.state == "done" else said(self.use.result))

    def _box(self, name: str, column: QVBoxLayout) -> QPlainTextEdit:
        label = text_label(self, name, role="secondary")
        box = QPlainTextEdit(self)
        box.setReadOnly(True)
        box.setAccessibleName(name)
        box.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        box.setTabChangesFocus(True)
        add_items(column, label, box)
        return box


def _fill(box: QPlainTextEdit, text: str) -> None:
    shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}\n…"
    if box.toPlainText() != shown:
        box.setPlainText(shown)
    lines = min(max(shown.count("\n") + 1, len(shown) // _LONGEST_LINE + 1), MOST_LINES)
    box.setFixedHeight(box.fontMetrics().lineSpacing() * lines + scaled(26))


def state_words(use: ToolUse, *, is_open: bool) -> str:
    if use.state == "denied":
        return translate("Tools", "not allowed")
    if use.state == "failed":
        return translate("Tools", "failed")
    if use.state == "done":
        return translate("Tools", "done in {0}").format(duration(use.seconds)) if use.seconds >= 1 else ""
    if not is_open:
        return translate("Tools", "stopped")
    return translate("Tools", "running…") if use.state == "running" else translate("Tools", "waits for you")


def one_line(use: ToolUse) -> str:
    if use.state == "failed":
        return " ".join(said(use.result).split())[:_LONGEST_LINE]
    try:
        given = json.loads(use.arguments)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        return use.arguments[:_LONGEST_LINE]
    told = {key: each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for key, each in given.items()}
    words = " ".join(", ".join(f"{key}: {each}" for key, each in told.items()).split())[:_LONGEST_LINE]
    is_short = use.state == "done" and len(use.result) <= _SHORT_RESULT and "\n" not in use.result.strip()
    return f"{words} → {use.result.strip()}".strip() if is_short and use.result.strip() else words


def pretty(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
    except ValueError:
        return arguments


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
