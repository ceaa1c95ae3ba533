"""Above the chat: the line with its title, the model and the device, and the field with which to find in it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Protocol

from PySide6.QtCore import QEvent, QObject, QRect, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QSizePolicy, QToolButton, QWidget

from app.icons import IconButton, icon
from app.models.conversation import ConversationModel
from app.services.background import timer
from app.services.engine_client import EngineClient, EngineState
from app.services.library import Library
from app.theme import scaled
from app.views.chat.phrases import device_text, model_text, rate, sent_text
from app.views.chat.transcript import Transcript
from app.widgets.chip import Chip, ChipButton, ElidedLabel
from app.widgets.quantities import count, percent
from app.widgets.scaffold import STRETCH, hbox, line_edit, push_button, text_label
from engine.protocol import Finished
from engine.remote.endpoint import RemoteModel

HEIGHT = 56
SPACING_PX = 12
_NO_NAME = re.compile(r"(sha256[-:])?[0-9a-f]{40,}")
"""What a hub's cache and Ollama call the files of a model."""
LEAST_TITLE_CHARACTERS = 14
"""A shorter title is useless: something else makes room for it."""


class TitleBar(QFrame):
    """Follows the engine; the title is set by the page.

    Signals: `new_chat`, `rename` (the title was double-clicked), `chats_wanted` (whether to show the list of chats),
    `models_wanted` (the model's name was clicked), `cancel_wanted` (of loading).
    """

    new_chat = Signal()
    rename = Signal()
    chats_wanted = Signal(bool)
    models_wanted = Signal()
    cancel_wanted = Signal()

    def __init__(self, client: EngineClient, library: Library, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._client, self._library = client, library
        self.setObjectName("chatTitleBar")
        self._title = ElidedLabel(self, role="title")
        self._title.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.model_button = ChipButton(self.tr("Model: {0}"), self)
        self.model_button.clicked.connect(self.models_wanted)
        self.cancel_button = IconButton("close", self.tr("Cancel loading"), self.cancel_wanted.emit, self)
        self._tokens_per_s = 0.0
        self.device_chip = Chip(self)
        self.new_button = push_button(self, do=self.new_chat, tip=self.tr("Start a new chat"), name=self.tr("New chat"))
        self._inside = inside = hbox(into=self.new_button, margins=(14, 0, 14, 0), gap=-1)
        words = text_label(self.new_button, self.tr("New chat"))
        key = text_label(self.new_button, self.tr("Ctrl N"))
        self._key = key
        words.setStyleSheet("font-weight: 600;")
        key.setProperty("role", "secondary")
        for label in (words, key):
            label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
            inside.addWidget(label)
        self.chats_button = QToolButton(self)
        self.chats_button.setProperty("kind", "quiet")
        self.chats_button.setIcon(icon("list", "muted"))
        self.chats_button.setCheckable(True)
        self.chats_button.setToolTip(self.tr("Chats  Ctrl+K"))
        self.chats_button.setAccessibleName(self.tr("List of chats"))
        self.chats_button.clicked.connect(self.chats_wanted)
        self.chats_button.hide()
        self._row = hbox(
            self.chats_button,
            (self._title, 1),
            self.model_button,
            self.cancel_button,
            self.device_chip,
            self.new_button,
            into=self,
            margins=(20, 0, 20, 0),
            gap=SPACING_PX,
        )
        self.setMinimumHeight(HEIGHT)
        for signal in (client.state_changed, client.loading_changed, client.model_loaded, client.responding_changed):
            signal.connect(self._refresh)
        client.answered.connect(self._on_answered)
        client.model_loaded.connect(self._on_loaded)
        self._refresh()

    def set_remote(self, remote: RemoteModel | None, gone: str = "") -> None:
        """Who answers in this chat, if that is a server elsewhere; `gone` says that it is no longer there."""
        self._remote, self._gone = remote, gone
        self._refresh()

    _remote: RemoteModel | None = None
    _gone = ""

    def set_title(self, title: str) -> None:
        self._title.set_full_text(title)
        self._title.set_tip(self.tr("Double-click or press F2 to rename"))
        self._fit()

    def offer_chats(self, offered: bool, *, shown: bool) -> None:
        self.chats_button.setVisible(offered)
        self.chats_button.setChecked(shown)
        self._fit()

    @property
    def title(self) -> str:
        return self._title.full_text

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self) -> None:
        margins = self._row.contentsMargins()
        words = self._title.full_text[:LEAST_TITLE_CHARACTERS]
        room = self.width() - margins.left() - margins.right() - self._title.fontMetrics().horizontalAdvance(words)
        if not self.chats_button.isHidden():
            room -= self.chats_button.sizeHint().width() + SPACING_PX
        if not self.cancel_button.isHidden():
            room -= self.cancel_button.width() + SPACING_PX
        chip, device = (one.sizeHint().width() + SPACING_PX for one in (self.model_button, self.device_chip))
        key = self._key.sizeHint().width() + self._inside.spacing()
        self._key.show()
        new = self._inside.sizeHint().width() + SPACING_PX
        chip = min(chip, self.model_button.maximumWidth())
        for with_device, with_key in ((True, True), (False, True), (False, False)):
            needed = new - (0 if with_key else key) + chip + (device if with_device else 0)
            if needed <= room:
                break
        self._key.setVisible(with_key)
        self.device_chip.setVisible(with_device and self._knows_device)
        self.new_button.setMinimumWidth(self._inside.sizeHint().width())
        self.new_button.setFixedHeight(max(32, self.new_button.fontMetrics().height() + 12))

    def mouseDoubleClickEvent(self, _event: object) -> None:
        if self._title.underMouse():
            self.rename.emit()

    def _refresh(self) -> None:
        state, model = self._client.state, self._client.model
        show = self.model_button.show_text
        self.cancel_button.setVisible(state is EngineState.LOADING)
        if self._remote is not None or self._gone:
            self._show_remote()
            return
        if state is EngineState.DIED:
            show(self.tr("engine stopped"), dot="miss", tip=self._client.last_error)
        elif not self._client.is_responding:
            show(self.tr("engine not responding"), dot="miss", tip=self._client.last_error)
        elif state is EngineState.LOADING:
            config, part = self._client.config, self._client.loading
            words = self.tr("loading {0}").format(self._name_at(config.model if config else ""))
            show(words if part is None else f"{words} {percent(part)}", dot="cpu", tip=config.model if config else "")
        elif state is EngineState.STARTING:
            show(self.tr("starting the engine"), dot="cpu")
        elif model is not None:
            speed = rate(self._tokens_per_s) if self._tokens_per_s else ""
            show(" · ".join(filter(None, (model_text(model), speed))), dot="pcie", tip=self._model_tip())
        else:
            show(self.tr("no model loaded"), dot="idle")
        shown = model is not None and state in (EngineState.READY, EngineState.BUSY)
        self._knows_device = shown
        if model is not None and shown:
            warns = (model.is_hampered or model.card_is_back) and not model.is_tuned
            said = self.tr("tuned") if model.is_tuned else model.device_note if warns else ""
            text = " · ".join(filter(None, (device_text(model), said)))
            self.device_chip.show_text(text, warns=warns, tip=model.device_note)
        self._fit()

    def _show_remote(self) -> None:
        remote = self._remote
        self._knows_device = False  # what is known of it stands in the button, and below the chat
        if remote is None:
            self.model_button.show_text(self.tr("server not in the list"), dot="miss", tip=self._gone)
        else:
            sent = sent_text(remote.endpoint)
            model = remote.model or self.tr("its only model")
            words = self.tr("{0} · sent to {1}").format(model, remote.endpoint.name)
            self.model_button.show_text(words, dot="pcie", tip=f"{model}\n{sent}\n{remote.endpoint.url}")
        self._fit()

    def _name_at(self, path: str) -> str:
        entry = self._library.entry(path)
        if entry is not None:
            return entry.name
        name = Path(path).name.removesuffix(".gguf")
        return self.tr("the model") if not name or _NO_NAME.fullmatch(name) else name

    def _on_answered(self, answer: Finished) -> None:
        if answer.tokens_per_s > 0:
            self._tokens_per_s = answer.tokens_per_s
            self._refresh()

    def _on_loaded(self) -> None:
        self._tokens_per_s = 0.0  # of the model before
        self._refresh()

    _knows_device = False

    def _model_tip(self) -> str:
        model = self._client.model
        if model is None:
            return ""
        lines = [model.path, device_text(model)]
        if model.experts:
            experts = self.tr("{0} experts per layer, {1} per token").format(model.experts, model.experts_per_token)
            lines.append(experts)
        if self._tokens_per_s:
            lines.append(self.tr("Speed: of the last answer"))
        if model.template_note:
            lines.append(model.template_note)
        return "\n".join(lines)


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
