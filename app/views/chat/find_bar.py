"""Find in the chat that is open: a field with a count above the conversation, and the search behind it."""

from __future__ import annotations

import re
import time
from typing import Protocol

from PySide6.QtCore import QEvent, QObject, QRect, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QFrame, QWidget

from app.icons import IconButton
from app.models.conversation import ConversationModel
from app.services.background import timer
from app.theme import scaled
from app.views.chat.transcript import Transcript
from app.widgets.quantities import count
from app.widgets.scaffold import STRETCH, hbox, line_edit, text_label

LOOK_MS = 150
"""After the last key, or the last change of an answer."""
SLICE_S = 0.012
_MARKUP = re.compile(r"[*_`~\\]+")


class Findable(Protocol):
    def find_text(self, text: str) -> int:
        """How often a text stands in it; marks all of them.  An empty text takes the marks away."""

    def show_match(self, number: int | None) -> QRect:
        """Marks one of them above the others; where it is, in the turn's own coordinates."""


class FindBar(QFrame):
    """Signals: `searched` (the text), `stepped` (-1 or 1), `closed`."""

    searched = Signal(str)
    stepped = Signal(int)
    closed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("findBar", True)
        self.field = line_edit(self, self.tr("Find in this chat"), clears=True, hints=True)
        self.field.setMaximumWidth(scaled(320))
        self.field.textChanged.connect(self.searched)
        self.field.installEventFilter(self)
        self.count = text_label(self, role="secondary", tabular=True)
        before = IconButton("chevron-up", self.tr("Previous match  Shift+F3"), lambda: self.stepped.emit(-1), self)
        after = IconButton("chevron-down", self.tr("Next match  F3"), lambda: self.stepped.emit(1), self)
        close = IconButton("close", self.tr("Close  Esc"), self.closed.emit, self)
        hbox((self.field, 1), self.count, before, after, STRETCH, close, into=self, margins=(20, 8, 16, 8), gap=6)
        self.hide()

    def show_count(self, number: int, total: int, *, is_looking: bool) -> None:
        if not self.field.text():
            words = ""
        elif total:
            words = self.tr("{0} of {1}").format(count(number), count(total))
        else:
            words = self.tr("looking…") if is_looking else self.tr("not in this chat")
        if words != self.count.text():
            self.count.setText(words)
            self.count.setAccessibleName(words)

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if not isinstance(event, QKeyEvent):
            return False
        is_escape = event.key() == Qt.Key.Key_Escape
        if event.type() == QEvent.Type.ShortcutOverride and is_escape:
            event.accept()
            return True
        if event.type() != QEvent.Type.KeyPress:
            return False
        if is_escape:
            self.closed.emit()
            return True
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.stepped.emit(-1 if event.modifiers() & Qt.KeyboardModifier.ShiftModifier else 1)
            return True
        return False


class FindInChat(QObject):
    """Looks through the turns on screen a few at a time, so that the window stays alive in a long chat."""

    def __init__(self, bar: FindBar, model: ConversationModel, transcript: Transcript) -> None:
        super().__init__(bar)
        self._bar, self._model, self._transcript = bar, model, transcript
        self._text = ""
        self._left: list[str] = []
        """Turns that are still to be looked through."""
        self._found: list[tuple[str, int]] = []
        """Ids of messages, and which match within them."""
        self._at = 0
        self._wanted = ""
        """The message whose first match is to be shown."""
        self._soon = timer(self, self._begin, LOOK_MS, once=True)
        self._slices = timer(self, self._look, 0, once=True)
        bar.searched.connect(lambda _text: self._soon.start())
        bar.stepped.connect(self.step)
        bar.closed.connect(self.close)
        model.modelReset.connect(self._on_changed)
        model.rowsInserted.connect(self._on_changed)
        model.rowsRemoved.connect(self._on_changed)
        model.dataChanged.connect(self._on_changed)

    @property
    def is_open(self) -> bool:
        return not self._bar.isHidden()

    def open(self, text: str | None = None, message_id: str = "") -> None:
        self._bar.show()
        self._wanted = message_id
        if text is not None:
            self._bar.field.setText(text)
            self._begin()
        else:
            self._bar.field.setFocus(Qt.FocusReason.ShortcutFocusReason)
            self._bar.field.selectAll()

    def close(self) -> None:
        self._bar.hide()
        self._soon.stop()
        self._slices.stop()
        self._unmark()
        self._text = ""

    def step(self, offset: int) -> None:
        if self._soon.isActive():
            self._begin()
        if self._found:
            self._at = (self._at + offset) % len(self._found)
            self._show()

    # --- inside ---

    def _on_changed(self, *_: object) -> None:
        if self.is_open and self._bar.field.text():
            self._soon.start()

    def _unmark(self) -> None:
        for turn in self._transcript.turns:
            turn.find_text("")
        self._found = []

    def _begin(self) -> None:
        self._soon.stop()
        text = self._bar.field.text().strip()
        before = self._found[self._at] if text == self._text and self._at < len(self._found) else None
        self._unmark()
        self._text, self._at, self._keep = text, 0, before
        self._left = []
        if text:
            self._left = self._ids(text)
            self._slices.start()
        self._bar.show_count(0, 0, is_looking=bool(self._left))

    _keep: tuple[str, int] | None = None
    """The match that is shown, and stays so."""

    def _ids(self, text: str) -> list[str]:
        """The turns that may contain it, by their source; the folded ones are shown if one of them does."""
        needle = _MARKUP.sub("", text).casefold()

        def has(content: str) -> bool:
            return needle in _MARKUP.sub("", content).casefold() or text.casefold() in content.casefold()

        _, folded, _ = self._model.tree.folded()
        if any(has(message.content) for message in folded):
            self._model.show_folded(True)
        return [row.message.id for row in self._model.rows if row.card is None and has(row.message.content)][::-1]

    def _look(self) -> None:
        until = time.perf_counter() + SLICE_S
        while self._left and time.perf_counter() < until:
            message_id = self._left.pop()
            turn = self._transcript.built(message_id)
            if turn is not None:
                self._found += [(message_id, number) for number in range(turn.find_text(self._text))]
        if self._left:
            self._slices.start()
        else:
            self._settle()

    def _settle(self) -> None:
        self._bar.show_count(0, 0, is_looking=False)
        if not self._found:
            return
        wanted = next((n for n, (id_, _) in enumerate(self._found) if id_ == self._wanted), None)
        if wanted is not None:
            self._wanted = ""
            self._at = wanted
        elif self._keep in self._found:
            self._at = self._found.index(self._keep)
            self._show(scrolls=False)
            return
        self._show()

    def _show(self, *, scrolls: bool = True) -> None:
        chosen, number = self._found[self._at]
        for turn in self._transcript.turns:
            if turn.message_id != chosen and any(id_ == turn.message_id for id_, _ in self._found):
                turn.show_match(None)
        turn_ = self._transcript.built(chosen)
        if turn_ is not None:
            place = turn_.show_match(number)
            if scrolls:
                self._transcript.show_place(turn_, place)
        self._bar.show_count(self._at + 1, len(self._found), is_looking=False)
