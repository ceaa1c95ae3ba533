"""The models on this PC, to choose one for the chat: opened by the model's name in the header, or by Ctrl+M."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListView,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.models.model_choices import CHOICE_ROLE, ModelChoice, ModelChoices
from app.services.engine_client import EngineClient, EngineState
from app.services.library import Library
from app.services.model_speeds import ModelSpeeds
from app.services.settings import STARTER, Settings
from app.theme import scaled
from app.views.chat.model_delegate import ModelDelegate
from app.views.chat.phrases import choice_text
from app.widgets.popover import Popover
from app.widgets.quantities import percent
from app.widgets.shortcuts import note_keys

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry

WIDTH_PX = 460
MOST_ROWS = 6


class ModelPicker(Popover):
    """The library is looked through whenever it opens.

    Signals:
        load_wanted(str): the name or path of a model.
        cancel_wanted, unload_wanted: stop loading; free the memory of the model.
        file_wanted: open a model that lies elsewhere.
        more_wanted: look for others.
    """

    load_wanted = Signal(str)
    cancel_wanted = Signal()
    unload_wanted = Signal()
    file_wanted = Signal()
    more_wanted = Signal()

    def __init__(
        self, client: EngineClient, settings: Settings, library: Library, speeds: ModelSpeeds, parent: QWidget
    ) -> None:
        super().__init__(self.tr("Models on this PC"), parent)
        self._client = client
        self._settings = settings
        self._library = library
        self._speeds = speeds
        self.choices = ModelChoices(choice_text, self)
        self.filter = QLineEdit(self)
        self.filter.setPlaceholderText(self.tr("Find a model"))
        self.filter.setAccessibleName(self.tr("Find a model"))
        self.filter.setClearButtonEnabled(True)
        self.list = QListView(self)
        self.list.setAccessibleName(self.tr("Models"))
        self.list.setModel(self.choices)
        self.list.setItemDelegate(ModelDelegate(self.list))
        self.list.setMouseTracking(True)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.nothing = QLabel(self)
        self.nothing.setProperty("role", "secondary")
        self.nothing.setWordWrap(True)
        self.loading_words = QLabel(self)
        self.loading_words.setProperty("role", "secondary")
        self.loading_bar = QProgressBar(self)
        self.loading_bar.setTextVisible(False)
        self.loading_bar.setAccessibleName(self.tr("Loading the model"))
        self.cancel_button = self._action(self.tr("Cancel loading"), self._cancel)
        self.load_button = self._action("", self._load_or_unload)
        self.default_button = self._action(self.tr("Set as default"), self._set_default)
        self.file_button = self._action(self.tr("Open a model file…"), self._open_file, kind="quiet")
        self.more_button = self._action(self.tr("Get more models…"), self._get_more, kind="quiet")
        self._lay_out()
        self._connect()

    # --- building ---

    def _action(self, text: str, do: object, *, kind: str = "") -> QPushButton:
        button = QPushButton(text, self)
        button.setProperty("kind", kind)
        button.clicked.connect(do)
        return button

    def _lay_out(self) -> None:
        self._loading = QWidget(self)
        bar_row = QHBoxLayout()
        bar_row.setSpacing(12)
        bar_row.addWidget(self.loading_bar, 1)
        bar_row.addWidget(self.cancel_button)
        loading = QVBoxLayout(self._loading)
        loading.setContentsMargins(0, 0, 0, 0)
        loading.setSpacing(4)
        loading.addWidget(self.loading_words)
        loading.addLayout(bar_row)
        actions = QHBoxLayout()
        actions.setSpacing(8)
        actions.addWidget(self.load_button)
        actions.addWidget(self.default_button)
        actions.addStretch(1)
        line = QFrame(self)
        line.setProperty("line", "true")
        ways = QHBoxLayout()
        ways.setSpacing(4)
        ways.addWidget(self.file_button)
        ways.addStretch(1)
        ways.addWidget(self.more_button)
        for widget in (self._loading, self.filter, self.list, self.nothing):
            self.column.addWidget(widget)
        self.column.addLayout(actions)
        self.column.addWidget(line)
        self.column.addLayout(ways)
        self.column.setContentsMargins(16, 14, 16, 10)

    def _connect(self) -> None:
        client = self._client
        self.filter.textChanged.connect(self._on_filter)
        self.list.doubleClicked.connect(self._load)
        self.list.selectionModel().currentChanged.connect(self._show_actions)
        self.choices.modelReset.connect(self._on_rows)
        self._library.listed.connect(self._on_listed)
        self._speeds.found.connect(self._on_speed)
        self._settings.changed.connect(self._on_setting)
        for signal in (client.state_changed, client.loading_changed, client.model_loaded):
            signal.connect(self._on_engine)
        self._show_actions()
        keys = self.tr("Up, Down, Enter"), self.tr("Choose a model in the list, and load it")
        note_keys(self.filter, (keys,))

    # --- opening ---

    def open_for(self, button: QWidget) -> None:
        """Opens at `button`, and lists what is there now."""
        if self.isVisible():
            self.close_and_return()
            return
        self._library.look()
        self.filter.clear()
        self._show()
        self._on_engine()
        self.open_at(button)
        self.filter.setFocus()

    def _on_listed(self) -> None:
        if not self.isVisible():
            return
        self._show()
        self._speeds.ask([choice.path for choice in self.choices.all if not (choice.tokens_per_s or choice.problem)])

    def _show(self) -> None:
        current = self._current()
        model = self._client.model
        loaded = model.path if model is not None else ""
        choices = [self._choice(entry, loaded) for entry in self._library.entries]
        if model is not None and not any(choice.is_loaded for choice in choices):  # opened from elsewhere
            is_default = self._settings.default_model == loaded
            given = ModelChoice(loaded, model.name, loaded, precision=model.precision, is_default=is_default)
            choices.insert(0, replace(given, is_loaded=True))
        known = {choice.path: choice for choice in self.choices.all if choice.tokens_per_s}
        self.choices.show(choices)
        for path, choice in known.items():
            self.choices.set_speed(path, choice.tokens_per_s, is_measured=choice.is_measured)
        self._select(current.path if current is not None else loaded)

    def _choice(self, entry: LibraryEntry, loaded: str) -> ModelChoice:
        path = str(entry.path)
        return ModelChoice(
            entry.name,
            self.tr("Starter") if entry.name == STARTER else entry.name,
            path,
            entry.bytes_on_disk,
            entry.precision_words,
            entry.origin if entry.is_in_place else "",
            entry.measured_tokens_per_s or 0.0,
            is_measured=entry.measured_tokens_per_s is not None,
            is_default=self._settings.default_model in (entry.name, path),
            is_loaded=path == loaded,
            problem=entry.problem,
        )

    # --- the list ---

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and not self.isHidden():
            self.list.doItemsLayout()
            self._on_rows()

    def _on_filter(self, text: str) -> None:
        self.choices.set_filter(text)
        self._select("")

    def _on_rows(self) -> None:
        shown, everything = len(self.choices.shown), len(self.choices.all)
        rows = max(1, min(shown, MOST_ROWS))
        height = self.list.sizeHintForRow(0) if shown else 0
        self.list.setFixedHeight(rows * height + 2)
        self.list.setVisible(shown > 0)
        self.filter.setVisible(everything > 1)
        self.nothing.setVisible(shown == 0)
        looking = self.tr("No model is on this PC yet.") if self._library.was_listed else self.tr("Looking for models…")
        self.nothing.setText(self.tr("No model has such a name.") if everything else looking)
        self.least_width = scaled(WIDTH_PX)
        self._show_actions()

    def _select(self, path: str) -> None:
        rows = [row for row, choice in enumerate(self.choices.shown) if choice.path == path]
        if self.choices.shown:
            self.list.setCurrentIndex(self.choices.index(rows[0] if rows else 0))

    def _current(self) -> ModelChoice | None:
        choice = self.list.currentIndex().data(CHOICE_ROLE)
        return choice if isinstance(choice, ModelChoice) else None

    def _on_speed(self, path: str, tokens_per_s: float, is_measured: bool) -> None:
        if not any(choice.path == path and choice.is_measured for choice in self.choices.all):
            self.choices.set_speed(path, tokens_per_s, is_measured=is_measured)

    def _on_setting(self, key: str) -> None:
        if key == "default_model" and self.isVisible():
            self._show()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        is_ours = watched in (self.filter, self.list)
        if is_ours and isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
                self._load()
                return True
            if watched is self.filter and event.key() in (Qt.Key.Key_Up, Qt.Key.Key_Down):
                QApplication.sendEvent(self.list, event)
                return True
        return super().eventFilter(watched, event)

    # --- the engine ---

    def _on_engine(self) -> None:
        loading = self._client.state is EngineState.LOADING
        self._loading.setVisible(loading)
        share = self._client.loading
        part = "" if share is None else f" {percent(share)}"
        self.loading_words.setText(self.tr("Loading the model{0}").format(part))
        self.loading_bar.setRange(0, 0 if share is None else 100)
        self.loading_bar.setValue(0 if share is None else round(100 * share))
        model = self._client.model
        loaded = {choice.path for choice in self.choices.all if choice.is_loaded}
        if self.isVisible() and loaded != ({model.path} if model is not None else set()):
            self._show()

    def _show_actions(self) -> None:
        choice = self._current()
        is_loaded = choice is not None and choice.is_loaded
        is_usable = choice is not None and not choice.problem
        self.load_button.setText(self.tr("Unload") if is_loaded else self.tr("Load"))
        self.load_button.setToolTip(self.tr("Frees the memory that the model takes") if is_loaded else "")
        self.load_button.setEnabled(is_usable)
        self.default_button.setEnabled(is_usable and choice is not None and not choice.is_default)
        self.default_button.setToolTip(self.tr("Loaded whenever Switchyard starts"))

    def _load(self) -> None:
        choice = self._current()
        if choice is not None and not choice.problem:
            self.hide()
            if not choice.is_loaded:
                self.load_wanted.emit(choice.name)

    def _load_or_unload(self) -> None:
        choice = self._current()
        if choice is not None and choice.is_loaded:
            self.unload_wanted.emit()
        else:
            self._load()

    def _cancel(self) -> None:
        self.cancel_wanted.emit()
        self.filter.setFocus()  # the button goes away

    def _set_default(self) -> None:
        choice = self._current()
        if choice is not None:
            self._settings.default_model = choice.name
            self.list.setFocus()  # the button is disabled now

    def _open_file(self) -> None:
        self.hide()
        self.file_wanted.emit()

    def _get_more(self) -> None:
        self.hide()
        self.more_wanted.emit()
