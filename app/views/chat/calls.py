"""Calls of tools in an answer: a quiet line for each, which opens, and the question whether one may run."""

from __future__ import annotations

import json

from PySide6.QtCore import QCoreApplication, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QVBoxLayout, QWidget

from app.engine_words import said
from app.icons import ICON_PX, icon
from app.services.chat_store import Message, MessageState, Step, ToolUse
from app.theme import scaled, use_tabular_figures
from app.widgets.answer_text import AnswerView
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
    """A call's arguments and a short result, or why it failed."""
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
