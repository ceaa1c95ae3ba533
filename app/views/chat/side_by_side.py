"""One question to two models, or to one with two settings: two answers in columns, of which one goes on.

The answers are versions of one turn in the chat, as if it had been answered again: nothing is lost when the window
closes, and the one that was not chosen can still be stepped to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from PySide6.QtCore import QObject, QSize, Qt, Signal
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import QDialog, QFrame, QPushButton, QScrollArea, QWidget

from app.models.conversation import MessageRow
from app.services.answer_queue import Phase
from app.services.chat_store import Message, MessageState
from app.services.endpoints import Endpoints
from app.services.engine_client import EngineClient, EngineState
from app.services.kept import Preset, SavedPresets
from app.services.library import Library
from app.theme import scaled
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.presenter import ChatPresenter, Way
from app.views.chat.turn_column import TurnColumn
from app.widgets.answer_text import open_link
from app.widgets.fields import ComboBox, TextBox
from app.widgets.page import add_shortcut
from app.widgets.sampling_popover import SamplingPopover
from app.widgets.scaffold import RIGHT, WrappedLabel, hbox, push_button, set_message, vbox
from engine.common.config import SamplingParams
from engine.common.model_info import ModelInfo
from engine.remote.endpoint import RemoteModel, is_remote, remote_name

SIZE = QSize(980, 680)
Agree = Callable[[RemoteModel, Callable[[], object]], object]
"""Does something that sends text to a server, at once or when people agree."""


class Column(QFrame):
    changed = Signal()
    picked = Signal()
    acted = Signal(str)

    def __init__(self, number: int, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        names = (self.tr("First"), self.tr("Second"))
        self.model = ComboBox(self, name=self.tr("{0}: model").format(names[number]))
        self.model.setMinimumWidth(60)
        self.model.activated.connect(self.changed)
        self.sampling_button = push_button(self, kind="chip", name=self.tr("{0}: sampling").format(names[number]))
        self.sampling: SamplingParams | None = None
        self.words = WrappedLabel("", self, role="secondary")
        self._scroll = QScrollArea(self)
        self._scroll.setWidgetResizable(True)
        self._scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll.setAccessibleName(self.tr("{0} answer").format(names[number]))
        self._turns = TurnColumn(self._scroll, 0)
        self._scroll.setWidget(self._turns)
        self.answer: AnswerMessage | None = None
        self.pick_button = push_button(
            self,
            self.tr("Go on with this"),
            self.picked,
            name=self.tr("Go on with the {0} answer").format(names[number].lower()),
        )
        self.pick_button.setEnabled(False)
        vbox(
            hbox((self.model, 1), self.sampling_button),
            self.words,
            (self._scroll, 1),
            (self.pick_button, RIGHT),
            into=self,
            margins=(14, 12, 14, 12),
        )
        self.say("")

    @property
    def way(self) -> Way:
        return Way(self.model.currentData() or "", self.sampling)

    def say(self, words: str) -> None:
        set_message(self.words, words)

    def show_answer(self, message: Message) -> None:
        row = MessageRow(message)
        if self.answer is None:
            self.answer = AnswerMessage(row, self._turns)
            self.answer.acted.connect(self.acted)
            self.answer.link_activated.connect(open_link)
            self._turns.insert(0, self.answer)
            self._turns.place()
        else:
            self.answer.set_row(row)
        self.say("")
        self.pick_button.setEnabled(message.state is not MessageState.STREAMING and bool(message.content))

    def clear(self) -> None:
        if self.answer is not None:
            self._turns.remove(self.answer)
            self.answer.deleteLater()
            self.answer = None
        self.pick_button.setEnabled(False)

    def set_able(self, able: bool) -> None:
        self.model.setEnabled(able)
        self.sampling_button.setEnabled(able)


class Comparison(QObject):
    """Asks two; those that need another model on this PC wait until what is asked of the loaded one is done.

    Signals:
        answered(int, Message): the answer of the first (0) or second (1) has begun, has grown or ended.
        phase(int, Phase)
        waits(int, str): what it waits for, in a sentence.
        load_wanted(str): the path of a model.
        ended: nothing more comes.
    """

    answered = Signal(int, object)
    phase = Signal(int, object)
    waits = Signal(int, str)
    load_wanted = Signal(str)
    ended = Signal()

    def __init__(self, presenter: ChatPresenter, client: EngineClient, parent: QObject) -> None:
        super().__init__(parent)
        self._presenter, self._client = presenter, client
        self.question = ""
        self.answers: list[str] = ["", ""]
        self._ways: list[Way] = [Way(), Way()]
        self._waiting: list[int] = []
        self._loading = ""
        presenter.queue.changed.connect(self._on_answer)
        presenter.queue.phase_changed.connect(self._on_phase)
        client.model_loaded.connect(self._on_loaded)
        client.state_changed.connect(self._on_state)

    def ask(self, text: str, ways: tuple[Way, Way]) -> bool:
        self.question = self._presenter.put_question(text)
        if not self.question:
            return False
        self._ways, self.answers = list(ways), ["", ""]
        self._waiting = [number for number in (0, 1) if self._needs_loading(ways[number])]
        for number in (0, 1):
            if number not in self._waiting:
                self.ask_one(number)
        self._go_on()
        return True

    def ask_one(self, number: int) -> None:
        self.answers[number] = self._presenter.answer_with(self.question, self._ways[number])
        self.answered.emit(number, self._presenter.model.tree[self.answers[number]])

    def stop(self) -> None:
        self._waiting.clear()
        self._loading = ""
        self._presenter.queue.stop_all(id_ for id_ in self.answers if id_)
        self.ended.emit()

    @property
    def is_under_way(self) -> bool:
        return bool(self._waiting) or any(self._is_writing(number) for number in (0, 1))

    def _is_writing(self, number: int) -> bool:
        tree, id_ = self._presenter.model.tree, self.answers[number]
        return id_ in tree and tree[id_].state is MessageState.STREAMING

    def _needs_loading(self, way: Way) -> bool:
        model = self._client.model
        return bool(way.model) and not is_remote(way.model) and (model is None or model.path != way.model)

    def _go_on(self) -> None:
        """Loads the next model once the one that is loaded has nothing more to answer."""
        for number in self._waiting:
            self.waits.emit(number, self.tr("One model is open at a time on this PC: this answer comes second."))
        here = [n for n in (0, 1) if self._is_writing(n) and not is_remote(self._ways[n].model)]
        if self._waiting and not here and not self._loading:
            number = self._waiting[0]
            self._loading = self._ways[number].model
            self.waits.emit(number, self.tr("The model is loading; its answer follows."))
            self.load_wanted.emit(self._loading)
        if not self.is_under_way:
            self.ended.emit()

    def _on_loaded(self, model: ModelInfo) -> None:
        if not self._waiting or not self._loading:
            return
        number = self._waiting[0]
        if model.path == self._loading:
            del self._waiting[0]
            self._loading = ""
            self.ask_one(number)
            self._go_on()

    def _on_state(self, state: EngineState) -> None:
        is_idle = state in (EngineState.READY, EngineState.DIED, EngineState.STOPPED)
        if self._loading and self._waiting and is_idle and self._client.model is None:  # it was not loaded
            number = self._waiting.pop(0)
            self._loading = ""
            self.waits.emit(number, self.tr("The model was not loaded, so there is no answer from it."))
            self._go_on()

    def _on_answer(self, message: Message) -> None:
        if message.id in self.answers:
            self.answered.emit(self.answers.index(message.id), message)
            if message.state is not MessageState.STREAMING:
                self._go_on()

    def _on_phase(self, message_id: str, phase: Phase) -> None:
        if message_id in self.answers:
            self.phase.emit(self.answers.index(message_id), phase)


class SideBySide(QDialog):
    """Signals:
    load_wanted(str): the path of a model.
    restart_wanted: restart the engine.
    """

    load_wanted = Signal(str)
    restart_wanted = Signal()

    def __init__(
        self,
        presenter: ChatPresenter,
        client: EngineClient,
        library: Library,
        endpoints: Endpoints,
        presets: SavedPresets,
        agree: Agree,
        parent: QWidget,
    ) -> None:
        super().__init__(parent)
        self._presenter, self._client, self._library, self._endpoints = presenter, client, library, endpoints
        self._agree = agree
        self.setWindowTitle(self.tr("Side by side"))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        window = parent.window().size()
        self.resize(QSize(scaled(SIZE.width()), scaled(SIZE.height())).boundedTo(window - QSize(24, 24)))
        self.comparison = Comparison(presenter, client, self)
        self.question = TextBox(self)
        self.question.setAccessibleName(self.tr("Question for both"))
        self.question.setPlaceholderText(self.tr("One question for both"))
        self.question.setTabChangesFocus(True)
        self.question.setFixedHeight(3 * self.question.fontMetrics().lineSpacing() + 18)
        self.question.textChanged.connect(self._enable)
        self.columns = (Column(0, self), Column(1, self))
        self._popover = SamplingPopover(self, presets)
        self._popover.set_model(client.model)
        self._popover.changed.connect(self._on_sampling)
        self._edited = 0
        self.ask_button = push_button(
            self,
            self.tr("Ask both"),
            self._on_button,
            kind="primary",
            tip=QKeySequence("Ctrl+Return").toString(QKeySequence.SequenceFormat.NativeText),
        )
        self.note = WrappedLabel("", self, role="secondary")
        close = push_button(self, self.tr("Close"), self.close)
        self._lay_out(close)
        self._connect()
        self._fill_models()
        library.look()
        self._enable()

    def open_for(self, text: str) -> None:
        chat = self._presenter.conversation
        first, second = self.columns
        self._choose(first, chat.model if is_remote(chat.model) else "")
        first.sampling, second.sampling = chat.sampling, chat.sampling
        others = [first.model.itemData(n) for n in range(first.model.count())]
        other = next((model for model in others if model != first.way.model), None)
        if other is not None:
            self._choose(second, other)
        else:
            self._choose(second, first.way.model)
            is_creative = chat.sampling is not None and chat.sampling == Preset.CREATIVE.beside(self._popover.own)
            second.sampling = (Preset.PRECISE if is_creative else Preset.CREATIVE).beside(self._popover.own)
        self._show_sampling()
        self.question.setPlainText(text)
        self.open()
        (self.ask_button if text.strip() else self.question).setFocus()

    # --- building ---

    def _lay_out(self, close: QPushButton) -> None:
        beside = hbox(gap=12)
        for column in self.columns:
            beside.addWidget(column, 1)
        vbox(
            hbox((self.question, 1), (self.ask_button, Qt.AlignmentFlag.AlignBottom), gap=12),
            (beside, 1),
            hbox((self.note, 1), close, gap=-1),
            into=self,
            margins=(16, 16, 16, 14),
            gap=12,
        )

    def _connect(self) -> None:
        add_shortcut(self, "Ctrl+Return", self.tr("Ask both"), self.ask_button.click)
        do = self.comparison
        do.answered.connect(self._on_answer)
        do.phase.connect(self._on_phase)
        do.waits.connect(lambda number, words: self.columns[number].say(words))
        do.load_wanted.connect(self.load_wanted)
        do.ended.connect(self._enable)
        self._library.listed.connect(self._fill_models)
        self._client.model_loaded.connect(self._popover.set_model)
        for number, column in enumerate(self.columns):
            column.changed.connect(self._enable)
            column.sampling_button.clicked.connect(partial(self._edit_sampling, number))
            column.picked.connect(partial(self._pick, number))
            column.acted.connect(partial(self._act, number))

    def _fill_models(self) -> None:
        model = self._client.model
        here = self.tr("The model here") if model is None else model.name
        choices = [(here, "")]
        loaded = model.path if model is not None else ""
        choices += [(e.name, str(e.path)) for e in self._library.entries if e.can_chat and str(e.path) != loaded]
        for endpoint, name, _context in self._endpoints.models():
            choices.append((f"{name or self.tr('its only model')} ({endpoint.name})", remote_name(endpoint, name)))
        for column in self.columns:
            chosen = column.model.currentData()
            column.model.clear()
            for words, data in choices:
                column.model.addItem(words, data)
            self._choose(column, chosen or "")

    @staticmethod
    def _choose(column: Column, model: str) -> None:
        column.model.setCurrentIndex(max(0, column.model.findData(model)))

    # --- what people do ---

    def _edit_sampling(self, number: int) -> None:
        self._edited = number
        column = self.columns[number]
        self._popover.edit(column.sampling, column.sampling_button)

    def _on_sampling(self, sampling: object) -> None:
        self.columns[self._edited].sampling = sampling  # type: ignore[assignment]
        self._show_sampling()

    def _show_sampling(self) -> None:
        for column in self.columns:
            column.sampling_button.setText(self._popover.name_of(column.sampling))
            column.sampling_button.setToolTip(self._popover.words_of(column.sampling))
        self._enable()

    def _on_button(self) -> None:
        if self.comparison.is_under_way:
            self.comparison.stop()
            return
        ways = (self.columns[0].way, self.columns[1].way)
        remotes = [remote for way in ways if (remote := self._endpoints.find(way.model)) is not None]
        self._once_agreed(remotes, lambda: self._ask(ways))

    def _once_agreed(self, remotes: list[RemoteModel], do: Callable[[], object]) -> None:
        if remotes:
            self._agree(remotes[0], lambda: self._once_agreed(remotes[1:], do))
        else:
            do()

    def _ask(self, ways: tuple[Way, Way]) -> None:
        for column in self.columns:
            column.clear()
        if not self.comparison.ask(self.question.toPlainText(), ways):
            self.note.setText(self.tr("This chat is being answered: wait for the end, or stop it."))
            return
        self._enable()

    def _pick(self, number: int) -> None:
        way, answer = self.columns[number].way, self.comparison.answers[number]
        self.comparison.stop()
        self._presenter.choose(answer)
        self._presenter.set_sampling(way.sampling)
        if is_remote(way.model) or self._presenter.is_elsewhere:
            self._presenter.choose_model(way.model if is_remote(way.model) else "")
        model = self._client.model
        if way.model and not is_remote(way.model) and (model is None or model.path != way.model):
            self.load_wanted.emit(way.model)
        self.close()

    def _act(self, number: int, action: str) -> None:
        if action == "restart":
            self.restart_wanted.emit()
        elif action == "regenerate" and not self.comparison.is_under_way:
            self.columns[number].clear()
            self.comparison.ask_one(number)
            self._enable()
        elif action in ("branch", "continue"):
            answer = self.comparison.answers[number]
            self._pick(number)
            (self._presenter.branch if action == "branch" else self._presenter.continue_answer)(answer)

    # --- what comes of it ---

    def _on_answer(self, number: int, message: Message) -> None:
        self.columns[number].show_answer(message)
        self._enable()

    def _on_phase(self, number: int, phase: Phase) -> None:
        answer = self.columns[number].answer
        if answer is not None:
            answer.set_phase(phase)

    def _enable(self) -> None:
        under_way = self.comparison.is_under_way
        ways = [column.way for column in self.columns]
        are_same = ways[0] == ways[1]
        has_text = bool(self.question.toPlainText().strip())
        self.ask_button.setText(self.tr("Stop") if under_way else self.tr("Ask both"))
        self.ask_button.setEnabled(under_way or (has_text and not are_same))
        for column in self.columns:
            column.set_able(not under_way)
        here = {way.model for way in ways if not is_remote(way.model)}
        if are_same:
            words = self.tr("Choose another model or other settings for one of them.")
        elif len(here) > 1:
            words = self.tr("One model is open at a time on this PC: the second is loaded when the first has answered.")
        else:
            words = self.tr("Both answers are kept in the chat, as versions of one turn.")
        self.note.setText(words)
