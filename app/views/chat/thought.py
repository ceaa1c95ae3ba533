"""Parts of a turn: its versions, its editor, and what a model thought before its answer."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from PySide6.QtCore import QEvent, QObject, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QFrame, QWidget

from app.icons import ICON_PX, IconButton, icon
from app.services.background import timer
from app.services.chat_store import Message, MessageState
from app.theme import Theme, colours, use_tabular_figures
from app.views.chat.composer import GrowingEdit
from app.views.chat.phrases import thought_text
from app.widgets.answer_text import AnswerView
from app.widgets.fields import TextBox
from app.widgets.scaffold import STRETCH, hbox, push_button, text_label, vbox


class _LongEdit(GrowingEdit):
    most_lines = 24
    largest_share = 0.4

    def keyPressEvent(self, event: QKeyEvent) -> None:
        enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if enter and event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self.entered.emit()
        else:
            TextBox.keyPressEvent(self, event)


class MessageEditor(QFrame):
    """Signals: `saved` (the text), `cancelled` (also by Esc)."""

    saved = Signal(str)
    cancelled = Signal()

    def __init__(self, text: str, name: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("editor", True)
        self.box = _LongEdit(self)
        self.box.setAccessibleName(name)
        self.box.setPlainText(text)
        self.box.entered.connect(self._save)
        self.box.installEventFilter(self)
        cancel = push_button(self, self.tr("Cancel"), self.cancelled, kind="quiet")
        self.save_button = push_button(self, self.tr("Save"), self._save, tip=self.tr("Ctrl+Enter"))
        vbox(self.box, hbox(STRETCH, cancel, self.save_button, gap=-1), into=self, margins=(12, 10, 10, 10))

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape:
            if event.type() == QEvent.Type.ShortcutOverride:
                event.accept()
                return True
            if event.type() == QEvent.Type.KeyPress:
                self.cancelled.emit()
                return True
        return False

    def _save(self) -> None:
        self.saved.emit(self.box.toPlainText())


class VersionSwitch(QWidget):
    """Hidden while there is only one version.

    Signals: `step`, -1 or 1.
    """

    step = Signal(int)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._back = IconButton("chevron-left", self.tr("Earlier version"), lambda: self.step.emit(-1), self)
        self._on = IconButton("chevron-right", self.tr("Later version"), lambda: self.step.emit(1), self)
        self._label = text_label(self, role="secondary")
        hbox(self._back, self._label, self._on, into=self, margins=(0, 0, 6, 0), gap=2)
        self.hide()

    @property
    def text(self) -> str:
        return self._label.text()

    def show_version(self, version: int, versions: int) -> None:
        self._label.setText(self.tr("{0} of {1}").format(version, versions))
        self._back.setEnabled(version > 1)
        self._on.setEnabled(version < versions)
        self.setVisible(versions > 1)


COPIED_MS = 1500
TICK_MS = 1000
INDENT_PX = 10


class ThoughtText(AnswerView):
    def theme(self) -> Theme:
        theme = colours()
        return replace(theme, text=theme.muted)


class Thought(QWidget):
    """Folded, nothing of the text is laid out.

    Signals: link_activated.
    """

    link_activated = Signal(QUrl)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._message: Message | None = None
        self._told_s = 0.0
        self.body: ThoughtText | None = None
        self.header = push_button(self, kind="fold", checkable=True)
        self.header.setIconSize(QSize(ICON_PX, ICON_PX))
        self.header.setCursor(Qt.CursorShape.PointingHandCursor)
        self.header.toggled.connect(self._on_toggled)
        use_tabular_figures(self.header)
        self.copy_button = IconButton("copy", self.tr("Copy what it thought"), self._copy, self)
        self._tick = timer(self, self._show_header, TICK_MS)
        self._column = vbox(hbox(self.header, self.copy_button, STRETCH, gap=2), into=self, gap=6)
        self._show_fold()

    @property
    def is_open(self) -> bool:
        return self.header.isChecked()

    @property
    def is_thinking(self) -> bool:
        message = self._message
        return message is not None and message.state is MessageState.STREAMING and not message.content

    def set_message(self, message: Message) -> None:
        self._message, self._told_s = message, monotonic()
        self.setVisible(bool(message.reasoning))
        if message.reasoning and self.is_thinking:
            if not self._tick.isActive():
                self._tick.start()
        else:
            self._tick.stop()
        self._show_header()
        self._show_text()

    def _show_header(self) -> None:
        message = self._message
        if message is None:
            return
        # Between two tokens of a slow model the time goes on.
        since_s = monotonic() - self._told_s if self.is_thinking else 0.0
        self.header.setText(thought_text(message.reasoning_s + since_s, thinking=self.is_thinking))
        # A screen reader need not say each second.
        spoken = self.tr("Thinking") if self.is_thinking else self.header.text()
        if spoken != self.header.accessibleName():
            self.header.setAccessibleName(spoken)

    def _show_fold(self) -> None:
        self.header.setIcon(icon("chevron-down" if self.is_open else "chevron-right", "muted"))
        tip = self.tr("Fold what the model thought") if self.is_open else self.tr("Show what the model thought")
        self.header.setToolTip(tip)
        state = self.tr("unfolded") if self.is_open else self.tr("folded")
        self.header.setAccessibleDescription(f"{state}. {tip}")
        self.copy_button.setVisible(self.is_open)

    def _on_toggled(self) -> None:
        if self.is_open and self.body is None:
            self.body = body = ThoughtText(self)
            body.setAccessibleName(self.tr("What the model thought"))
            body.link_activated.connect(self.link_activated)
            self._indented = QWidget(self)
            bar = QFrame(self._indented)
            bar.setProperty("line", "thick")
            hbox(bar, body, into=self._indented, margins=(2, 0, 0, 4), gap=INDENT_PX)
            self._column.addWidget(self._indented)
            QWidget.setTabOrder(self.copy_button, body)
        if self.body is not None:
            self._indented.setVisible(self.is_open)
        self._show_fold()
        self._show_text()

    def _show_text(self) -> None:
        message, body = self._message, self.body
        if message is None or body is None or not self.is_open:
            return
        body.show_growing(message.reasoning, grows=self.is_thinking)

    def _copy(self) -> None:
        if self.body is not None:
            self.body.copy_all()
            self.copy_button.set_icon("check", self.tr("Copied"))
            restore = self.tr("Copy what it thought")
            QTimer.singleShot(COPIED_MS, self, lambda: self.copy_button.set_icon("copy", restore))
