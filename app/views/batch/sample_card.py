"""A trial: up to three of the first rows, answered before the whole job."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QVBoxLayout, QWidget

from app.services.batch_sample import SAMPLE_ROWS
from app.views.batch.phrases import end_text, translate
from app.widgets.quantities import SEPARATOR, count
from app.widgets.scaffold import Card, add_items, muted_label, push_button, set_message, text_label, vbox, warning_label
from engine.batch_files.messages import BatchRow

_SHOWN_CHARACTERS = 400


class SampleCard(Card):
    """Signals: `wanted`, to answer the first rows; `stop_wanted`."""

    wanted = Signal()
    stop_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(self.tr("Try the first rows"), parent)
        self._running = False
        self._rows = SAMPLE_ROWS
        self.button = push_button(self, do=lambda: (self.stop_wanted if self._running else self.wanted).emit())
        self.head.addWidget(self.button)
        self._words = muted_label(self)
        self._trouble = warning_label(self)
        self._answers = vbox(gap=0)
        self._shown: list[_Answer] = []
        add_items(self.body, self._words, self._trouble, self._answers)
        self.clear()

    def clear(self) -> None:
        """Clears the trial: there is none, or its settings have changed."""
        self._drop_answers()
        self._set_running(False)
        set_message(self._trouble, "")
        set_message(self._words, self.tr("See the answers, and how fast they come, before you start the job."))

    def set_rows(self, rows: int) -> None:
        """How many rows there are, or at least how many."""
        self._rows = min(rows, SAMPLE_ROWS)
        self._set_running(self._running)

    def begin(self) -> None:
        self._drop_answers()
        self._set_running(True)
        set_message(self._trouble, "")
        set_message(self._words, self.tr("Answering…"))

    def add(self, rows: Sequence[BatchRow]) -> None:
        for row in rows:
            place = sum(other.row < row.row for other in self._shown)
            block = _Answer(row, self)
            self._shown.insert(place, block)
            self._answers.insertWidget(place, block)

    def end(self, sentence: str) -> None:
        """The trial is done; `sentence` says what it predicts for the job."""
        self._set_running(False)
        set_message(self._words, sentence or (self.tr("Stopped.") if not self._shown else ""))

    def fail(self, sentence: str) -> None:
        """The trial failed; `sentence` says why."""
        self._set_running(False)
        set_message(self._words, "")
        set_message(self._trouble, sentence)

    def set_able(self, able: bool, why_not: str) -> None:
        """Whether a trial can start now."""
        self.button.setEnabled(able or self._running)
        self.button.setToolTip(why_not)

    @property
    def answers(self) -> int:
        return len(self._shown)

    def _set_running(self, running: bool) -> None:
        self._running = running
        words = {1: self.tr("Answer one row"), 2: self.tr("Answer two rows")}
        self.button.setText(self.tr("Stop") if running else words.get(self._rows, self.tr("Answer three rows")))
        self.button.setEnabled(True)

    def _drop_answers(self) -> None:
        for block in self._shown:
            self._answers.removeWidget(block)
            block.hide()
            block.deleteLater()
        self._shown.clear()


class _Answer(QWidget):
    def __init__(self, row: BatchRow, parent: QWidget) -> None:
        super().__init__(parent)
        self.row = row.row
        line = QFrame(self)
        line.setProperty("line", "true")
        column = vbox(line, 6, into=self, margins=(0, 4, 0, 6), gap=3)
        parts = [translate("Batch", "Row {0}").format(count(row.row + 1)), end_text(row)]
        if row.generated_tokens:
            parts.append(translate("Batch", "{0} tokens").format(count(row.generated_tokens)))
        self._text(column, SEPARATOR.join(parts), "caption")
        self._text(column, _short(row.prompt), "secondary")
        answer = translate("Batch", "The row {0}.").format(row.problem) if row.problem else _short(row.answer)
        self._text(column, answer or translate("Batch", "(an empty answer)"), "")

    def _text(self, column: QVBoxLayout, text: str, role: str) -> None:
        label = text_label(self, text, role=role, wrap=True)
        label.setTextInteractionFlags(label.textInteractionFlags().TextSelectableByMouse)
        label.setVisible(bool(text))
        column.addWidget(label)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
