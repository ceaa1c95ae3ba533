"""The engine, where an installed package does not have it yet: what is fetched and why, how far it is, what to do."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QProgressBar, QPushButton, QWidget

from app.services.engine_part import EnginePart, PartStage
from app.views.first_run.phrases import engine_words, step_words
from app.widgets.asking import ask_path
from app.widgets.download_words import download_words
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import Card, muted_label, push_button, set_message, warning_label

_OFFERS = (PartStage.OFFERED, PartStage.FAILED)
_BAR_STEPS = 1000


class EngineCard(Card):
    """Hidden where the engine is there.

    Signals: `settings_wanted`, for a mirror or a proxy.
    """

    settings_wanted = Signal()

    def __init__(self, part: EnginePart, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("First, the engine"))
        self._part = part
        self.text = muted_label(self, role="")
        self.why = muted_label(self)
        self.state = muted_label(self)
        self.problem = warning_label(self)
        self.bar = QProgressBar(self)
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName(self.tr("Progress of the engine"))
        self.get = self._button(self.tr("Get the engine and the starter"), lambda: part.fetch(starter=True))
        self.get.setProperty("kind", "primary")
        self.alone = self._button(self.tr("Engine only"), part.fetch)
        self.resume = self._button(self.tr("Resume"), part.fetch)
        self.again = self._button(self.tr("Try again"), part.fetch)
        self.pause = self._button(self.tr("Pause"), part.pause)
        self.cancel = self._button(self.tr("Cancel"), part.cancel)
        self.file = self._button(self.tr("Use a file…"), self._choose)
        self.file.setToolTip(self.tr("For a computer without a network: files that another computer has fetched"))
        self.network = self._button(self.tr("Mirror and proxy…"), self.settings_wanted.emit)
        for quiet in (self.file, self.network):
            quiet.setProperty("kind", "quiet")
        for widget in (self.text, self.why, self.bar, self.state, self.problem):
            self.body.addWidget(widget)
        self.head.addWidget(self.network)
        buttons = (self.get, self.alone, self.resume, self.again, self.pause, self.cancel, self.file)
        self.body.addWidget(Flow(*buttons, parent=self))
        part.changed.connect(self._show_state)
        part.ready.connect(self._show_state)
        self._show_state()

    def _button(self, text: str, do: Callable[[], object]) -> QPushButton:
        return push_button(self, text, lambda: do())  # without Qt's "checked"

    def _choose(self) -> None:
        kinds = self.tr("The engine's files (*.zip *.whl)")
        ask_path(self, self.tr("The engine's files"), self._part.use_files, kinds=kinds)

    def _show_state(self) -> None:
        part, stage = self._part, self._part.stage
        had_focus = any(button.hasFocus() for button in (self.get, self.alone, self.resume, self.pause, self.again))
        download = part.download
        about, why = engine_words(part.choice)
        self.text.setText(about)
        set_message(self.why, why)
        set_message(self.problem, part.problem if stage is PartStage.FAILED else "")
        on_way = stage in (PartStage.FETCHING, PartStage.PAUSED)
        words = download_words(download) if on_way and download is not None else step_words(stage, part.step)
        set_message(self.state, words)
        self.bar.setVisible(on_way or stage is PartStage.INSTALLING)
        if on_way and download is not None and download.total_bytes:
            self.bar.setRange(0, _BAR_STEPS)
            self.bar.setValue(_BAR_STEPS * download.done_bytes // download.total_bytes)
        else:
            self.bar.setRange(0, 0)
        shown = {
            self.get: stage is PartStage.OFFERED,
            self.alone: stage is PartStage.OFFERED,
            self.resume: stage is PartStage.PAUSED,
            self.again: stage is PartStage.FAILED,
            self.pause: stage is PartStage.FETCHING and download is not None,
            self.cancel: on_way and download is not None,
            self.file: stage in _OFFERS and part.choice is not None,
            self.network: stage in (*_OFFERS, PartStage.FETCHING, PartStage.PAUSED),
        }
        for button, is_shown in shown.items():
            button.setVisible(is_shown)
        if had_focus:  # not to Cancel, which the next key would press
            following = next((each for each in (self.resume, self.pause, self.again) if shown[each]), None)
            if following is not None:
                following.setFocus()
        self.setVisible(part.is_needed)
