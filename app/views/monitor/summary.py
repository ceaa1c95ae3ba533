"""One sentence on what the last tokens waited for, and the one change that would help."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QWidget

from app.services.engine_client import EngineState
from app.widgets.quantities import number
from app.widgets.timeline.readout import lane_title
from engine.telemetry.advice import Advice
from engine.telemetry.analysis import Waiting

translate = QCoreApplication.translate

_LEAST = 0.05
"""A smaller share is not worth a word."""


class SummaryCard(QFrame):
    """Signals: `tune_wanted`, when the user wants to act on the advice."""

    tune_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self._sentence = QLabel(self)
        self._sentence.setTextFormat(Qt.TextFormat.PlainText)
        font = self._sentence.font()
        font.setBold(True)
        self._sentence.setFont(font)
        self._sentence.setStyleSheet("font-weight: 600")
        self._sentence.setWordWrap(True)
        self._sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._change = QLabel(self)
        self._change.setProperty("role", "lead")
        self._change.setTextFormat(Qt.TextFormat.PlainText)
        self._change.setWordWrap(True)
        self.button = QPushButton(self.tr("Open Tune"), self)
        self.button.setProperty("kind", "primary")
        self.button.clicked.connect(lambda: self.tune_wanted.emit())
        row = QHBoxLayout(self)
        row.setContentsMargins(16, 10, 16, 10)
        row.setSpacing(12)
        row.addWidget(self._sentence, 5)
        row.addWidget(self._change, 4)
        row.addWidget(self.button)
        self.setMinimumHeight(54)

    def show_waiting(self, waiting: Waiting, advice: Advice | None) -> None:
        """What was waited for, and what would help."""
        self._tell(waiting_sentence(waiting), advice_sentence(advice))
        self.button.setVisible(advice is not None and advice.change != "none")

    def show_state(self, state: EngineState, *, has_model: bool) -> None:
        """Before anything has been decoded: what to do first."""
        sentence, hint = {
            EngineState.STARTING: (self.tr("The engine is starting."), ""),
            EngineState.LOADING: (self.tr("The model is loading."), ""),
            EngineState.DIED: (
                self.tr("The engine has ended."),
                self.tr("What was recorded until then is still here; the machine's lanes go on."),
            ),
        }.get(
            state,
            (self.tr("Nothing has been computed yet."), self.tr("Ask something in Chat and watch it here."))
            if has_model
            else (
                self.tr("No model is loaded."),
                self.tr("The machine is shown all the same. Load a model in Settings, then ask something in Chat."),
            ),
        )
        self._tell(sentence, hint)
        self.button.hide()

    def show_recorded(self, sentence: str, hint: str) -> None:
        """Instead of what happens now: a session that was opened."""
        self._tell(sentence, hint)
        self.button.hide()

    def _tell(self, sentence: str, change: str) -> None:
        self._sentence.setText(sentence)
        self._change.setText(change)
        self._change.setVisible(bool(change))
        self.setAccessibleName(f"{sentence} {change}".strip())


def waiting_sentence(waiting: Waiting) -> str:
    """`Last 200 tokens: 61% waiting for CPU experts, 21% the GPU.`"""
    if not waiting.tokens:
        return translate("SummaryCard", "Nothing has been decoded yet.")
    shares = [(lane, share) for lane, share in waiting.share.items() if share >= _LEAST][:3]
    first, *others = shares or list(waiting.share.items())[:1]
    head = (
        translate("SummaryCard", "The last token: {0}% waiting for {1}")
        if waiting.tokens == 1
        else translate("SummaryCard", "Last {2} tokens: {0}% waiting for {1}")
    ).format(number(100 * first[1], 0), lane_title(first[0]), waiting.tokens)
    parts = [f"{number(100 * share, 0)}% {lane_title(lane)}" for lane, share in others]
    return ", ".join((head, *parts)) + "."


def advice_sentence(advice: Advice | None) -> str:
    """What would help, and by how much it is thought to."""
    if advice is None:
        return ""
    gain = number(advice.gain, 1 if advice.gain >= 1.1 else 2)
    return {
        "threads": translate("SummaryCard", "{0} CPU threads would be about {1} times as fast (predicted)."),
        "cache_slots": translate("SummaryCard", "{0} experts in video memory: about {1} times as fast (predicted)."),
        "ram": translate("SummaryCard", "{0} experts in RAM would be about {1} times as fast (predicted)."),
        "precision": translate("SummaryCard", "{0} weights would be about {1} times as fast (predicted)."),
    }.get(advice.change, translate("SummaryCard", "No single change is thought to gain more than 5%.")).format(
        advice.value, gain
    )
