"""The icon in the desktop's tray, and the small window that asks one question from anywhere."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QObject, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QGuiApplication, QKeyEvent, QWindow
from PySide6.QtWidgets import (
    QFrame,
    QMenu,
    QScrollArea,
    QSystemTrayIcon,
    QWidget,
)

from app.icons import logo
from app.services.answer_queue import AnswerQueue, Phase, Stage, prompt_of
from app.services.chat_store import ChatStore, Conversation, Message, MessageState, new_id
from app.services.chat_store.records import new_conversation, title_from
from app.services.endpoints import Endpoints
from app.services.settings import Settings
from app.theme import scaled
from app.widgets.answer_text import AnswerView, open_link
from app.widgets.fields import TextBox
from app.widgets.scaffold import STRETCH, WrappedLabel, hbox, push_button, vbox
from engine.remote.endpoint import called, is_remote

SIZE = QSize(460, 132)
ANSWER_PX = 260


class QuickPrompt(QWidget):
    """One question and its answer, above other windows; a chat of its own, like any other.

    Signals:
        began: the `Conversation` of a question, once it is asked.
        open_wanted: id of the chat, to go on with it in the window.
    """

    began = Signal(object)
    open_wanted = Signal(str)

    def __init__(self, store: ChatStore, answers: AnswerQueue, settings: Settings, endpoints: Endpoints) -> None:
        super().__init__(None, Qt.WindowType.Tool | Qt.WindowType.WindowStaysOnTopHint)
        self._store, self._answers, self._settings, self._endpoints = store, answers, settings, endpoints
        self._conversation: Conversation | None = None
        self._answer: Message | None = None
        self.setWindowTitle(self.tr("Quick question"))
        self.setWindowIcon(logo())
        self.setProperty("pane", "background")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        # The program goes on when this closes, also while the main window is hidden.
        self.setAttribute(Qt.WidgetAttribute.WA_QuitOnClose, on=False)
        self.box = TextBox(self)
        self.box.setPlaceholderText(self.tr("Ask something"))
        self.box.setAccessibleName(self.tr("Question"))
        self.box.setAccessibleDescription(self.tr("Enter asks, Shift+Enter starts a new line, Esc closes"))
        self.box.setTabChangesFocus(True)
        self.box.setFixedHeight(3 * self.box.fontMetrics().lineSpacing() + 18)
        self.box.installEventFilter(self)
        self.box.textChanged.connect(self._show_buttons)
        self.answer = AnswerView(self)
        self.answer.link_activated.connect(open_link)
        self._scroll = QScrollArea(self)
        self._scroll.setWidgetResizable(True)
        self._scroll.setFrameShape(QFrame.Shape.NoFrame)
        self._scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll.setMinimumHeight(scaled(ANSWER_PX))
        self._scroll.setAccessibleName(self.tr("Answer"))
        holder = QWidget(self)
        vbox(self.answer, STRETCH, into=holder, margins=(0, 0, 8, 0), gap=-1)
        self._scroll.setWidget(holder)
        self.words = WrappedLabel("", self, role="secondary")
        self.ask_button = push_button(self, do=self._on_button, kind="primary")
        self.open_button = push_button(self, self.tr("Open in Switchyard"), self._open)
        vbox(
            self.box,
            self._scroll,
            hbox((self.words, 1), self.open_button, self.ask_button),
            into=self,
            margins=(14, 14, 14, 12),
            gap=10,
        )
        self._scroll.hide()
        self.resize(QSize(scaled(SIZE.width()), scaled(SIZE.height())))
        answers.changed.connect(self._on_answer)
        answers.phase_changed.connect(self._on_phase)
        self._show_buttons()

    def ask_again(self) -> None:
        self.show()
        self.raise_()
        self.activateWindow()
        self.box.setFocus()
        self.box.selectAll()

    @property
    def is_answering(self) -> bool:
        return self._answer is not None and self._answer.state is MessageState.STREAMING

    def ask(self, text: str) -> None:
        if not text.strip() or self.is_answering:
            return
        model = self._settings.chat_model
        remote = self._endpoints.find(model)
        if is_remote(model) and remote is None:
            self.words.setText(self.tr("The server that answers new chats is not in the list: choose another model."))
            return
        if remote is not None and not self._endpoints.is_agreed(remote.endpoint):
            words = self.tr("This would go to {0}: send a chat there from Switchyard first.")
            self.words.setText(words.format(called(remote.endpoint)))
            return
        chat = new_conversation(title=title_from(text), model=model, sampling=self._settings.default_sampling)
        question = Message(new_id(), chat.id, None, "user", text, created_at=chat.created_at)
        answer = Message(
            new_id(), chat.id, question.id, "assistant", "", MessageState.STREAMING, created_at=chat.created_at
        )
        self._conversation, self._answer = chat, answer
        self._store.create(chat, (question, answer))
        self.began.emit(chat)
        self.answer.show_growing("", grows=True)
        self._scroll.show()
        self.resize(self.width(), max(self.height(), self.sizeHint().height()))
        self.words.setText(self.tr("Waiting for the answer…"))
        self._answers.ask(answer, prompt_of("", (question,)), chat.sampling, remote)
        self._show_buttons()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:
            self.close()
        else:
            super().keyPressEvent(event)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self.box and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
            if enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
                self.ask(self.box.toPlainText())
                return True
            if event.key() == Qt.Key.Key_Escape:
                self.close()
                return True
        return super().eventFilter(watched, event)

    def _on_button(self) -> None:
        if self._answer is not None and self.is_answering:
            self._answers.stop(self._answer.id)
        else:
            self.ask(self.box.toPlainText())

    def _open(self) -> None:
        if self._conversation is not None:
            self.open_wanted.emit(self._conversation.id)
            self.close()

    def _on_answer(self, message: Message) -> None:
        if self._answer is None or message.id != self._answer.id:
            return
        self._answer = message
        streaming = message.state is MessageState.STREAMING
        self.answer.show_growing(message.content, grows=streaming)
        thinks = streaming and message.reasoning and not message.content
        self.words.setText(self.tr("Thinking…") if thinks else message.reason)
        self._show_buttons()

    def _on_phase(self, message_id: str, phase: Phase) -> None:
        if self._answer is None or message_id != self._answer.id:
            return
        words = {
            Stage.NO_ENGINE: self.tr("The engine is not running: open Switchyard to restart it."),
            Stage.NO_MODEL: self.tr("No model is loaded: open Switchyard to choose one."),
            Stage.LOADING: self.tr("The model is loading; the answer follows."),
            Stage.QUEUED: self.tr("Waiting for another answer…"),
            Stage.READING: self.tr("Waiting for the answer…"),
        }.get(phase.stage)
        if words is not None:
            self.words.setText(words)

    def _show_buttons(self) -> None:
        self.ask_button.setText(self.tr("Stop") if self.is_answering else self.tr("Ask"))
        self.ask_button.setEnabled(self.is_answering or bool(self.box.toPlainText().strip()))
        self.open_button.setVisible(self._conversation is not None)


class Tray(QObject):
    """There while the setting says so and the desktop has a tray.

    Signals:
        window_wanted: bring the window forward.
        quit_wanted: end the program, with all confirmations.
    """

    window_wanted = Signal()
    quit_wanted = Signal()

    def __init__(
        self,
        settings: Settings,
        make_prompt: Callable[[], QuickPrompt],
        window: QWidget,
        *,
        is_available: Callable[[], bool] = QSystemTrayIcon.isSystemTrayAvailable,
    ) -> None:
        super().__init__(window)
        self._settings, self._make_prompt, self._window = settings, make_prompt, window
        self._is_available = is_available
        self._icon: QSystemTrayIcon | None = None
        self._prompt: QuickPrompt | None = None
        self._frame: QWindow | None = None
        self._is_leaving = False
        self._has_said = False
        settings.changed.connect(self._on_setting)
        app = QGuiApplication.instance()
        if isinstance(app, QGuiApplication):
            app.commitDataRequest.connect(self.leave)
        self._follow()

    @property
    def is_there(self) -> bool:
        return self._icon is not None

    @property
    def keeps_running(self) -> bool:
        return self.is_there and self._settings.stays_in_tray and not self._is_leaving

    def leave(self, *_: object) -> None:
        """The close of the window that follows at once is one."""
        self._is_leaving = True
        QTimer.singleShot(0, self, self._stay)  # if people keep it open after all

    def _stay(self) -> None:
        self._is_leaving = False

    def watch(self) -> None:
        """Hides the window instead of closing it, where the setting says so; called once it has been shown.

        The frame hears of it first: what asks before the window closes need not ask then.
        """
        frame = self._window.windowHandle()
        if frame is not None and frame is not self._frame:
            self._frame = frame
            frame.installEventFilter(self)

    def ask(self) -> None:
        if self._prompt is None:
            self._prompt = self._make_prompt()
        self._prompt.ask_again()

    def close(self) -> None:
        if self._icon is not None:
            self._icon.hide()
            self._icon.deleteLater()
            self._icon = None
        if self._prompt is not None:
            self._prompt.close()
            self._prompt.deleteLater()
            self._prompt = None

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self._frame and isinstance(event, QCloseEvent) and self.keeps_running:
            event.ignore()
            self._window.hide()
            if not self._has_said and self._icon is not None:
                self._has_said = True
                self._icon.showMessage(
                    self.tr("Switchyard is still running"),
                    self.tr("Its window is hidden; the icon here opens it, asks a question, or quits."),
                    logo(),
                )
            return True
        return False

    def _on_setting(self, key: str) -> None:
        if key == "tray":
            self._follow()

    def _follow(self) -> None:
        wanted = self._settings.tray and self._is_available()
        if wanted and self._icon is None:
            self._icon = icon = QSystemTrayIcon(logo(), self)
            icon.setToolTip("Switchyard")
            icon.setContextMenu(self._menu())
            icon.activated.connect(self._on_activated)
            icon.show()
        elif not wanted:
            self.close()

    def _menu(self) -> QMenu:
        menu = QMenu(self._window)
        menu.addAction(self.tr("Quick question…"), self.ask)
        menu.addAction(self.tr("Open Switchyard"), self.window_wanted.emit)
        menu.addSeparator()
        menu.addAction(self.tr("Quit"), self._quit)
        return menu

    def speak(self) -> None:
        if self._icon is not None:
            self._icon.contextMenu().deleteLater()
            self._icon.setContextMenu(self._menu())
        if self._prompt is not None and not self._prompt.isVisible():
            self._prompt.deleteLater()
            self._prompt = None

    def _on_activated(self, reason: QSystemTrayIcon.ActivationReason) -> None:
        if reason in (QSystemTrayIcon.ActivationReason.Trigger, QSystemTrayIcon.ActivationReason.DoubleClick):
            self.ask()

    def _quit(self) -> None:
        self.leave()
        self.quit_wanted.emit()
