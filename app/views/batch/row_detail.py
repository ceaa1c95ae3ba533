"""One row with its full text."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent
from PySide6.QtWidgets import QLabel, QPlainTextEdit, QSizePolicy, QWidget

from app.services.background import LatestTask
from app.services.batch_answers import JobAnswers
from app.views.batch.phrases import end_text
from app.widgets.quantities import SEPARATOR, count
from app.widgets.scaffold import Card, muted_label, push_button, text_label
from engine.batch_files.messages import BatchRow
from engine.common.plain_text import few_marks

BOX_PX = 96


class RowDetail(Card):
    """Signals: `closed`."""

    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._reading = LatestTask(self)
        self._facts = muted_label(self)
        self.prompt = self._box(self.tr("Prompt"))
        self.reasoning = self._box(self.tr("Reasoning"))
        self.answer = self._box(self.tr("Answer"))
        copy = push_button(
            self, self.tr("Copy"), lambda: QGuiApplication.clipboard().setText(self.answer.toPlainText())
        )
        copy.setProperty("compact", "true")
        copy.setAccessibleName(self.tr("Copy the answer"))
        close = push_button(self, self.tr("Close"), self.close_detail)
        close.setProperty("compact", "true")
        self.head.setSpacing(6)
        self.head.addWidget(copy)
        self.head.addWidget(close)
        self.body.setSpacing(6)
        self.body.addWidget(self._facts)
        self._labels: dict[QPlainTextEdit, QLabel] = {}
        for box, share in ((self.prompt, 2), (self.reasoning, 2), (self.answer, 3)):
            label = text_label(self, box.accessibleName(), role="caption", buddy=box)
            self.body.addWidget(label)
            self.body.addWidget(box, share)
            self._labels[box] = label
        self._show_reasoning("")

    def show_row(self, row: BatchRow, answers: JobAnswers | None) -> None:
        """Shows what is known of a row at once, and its full text once read."""
        self._show(row)
        if answers is not None:
            self._reading.ask(lambda: answers.whole(row.row), self._on_whole)

    def close_detail(self) -> None:
        self._reading.forget()
        self.closed.emit()

    def close_down(self) -> None:
        self._reading.close()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:
            self.close_detail()
            return
        super().keyPressEvent(event)

    def _on_whole(self, row: BatchRow | None) -> None:
        if row is not None:
            self._show(row)

    def _show(self, row: BatchRow) -> None:
        self.set_heading(self.tr("Row {0}").format(count(row.row + 1)))
        facts = [end_text(row), self.tr("{0} tokens").format(count(row.generated_tokens))]
        if row.problem:
            facts = [self.tr("Failed: the row {0}.").format(row.problem)]
        self._facts.setText(SEPARATOR.join(facts))
        if row.prompt or not self.prompt.toPlainText():
            self.prompt.setPlainText(
                few_marks(row.prompt) or self.tr("The input can no longer be read, or the row was not sent.")
            )
        self.answer.setPlainText(few_marks(row.answer))
        self._show_reasoning(row.reasoning)

    def _show_reasoning(self, text: str) -> None:
        self.reasoning.setPlainText(text)
        for widget in (self.reasoning, self._labels[self.reasoning]):
            widget.setVisible(bool(text))

    def _box(self, name: str) -> QPlainTextEdit:
        box = QPlainTextEdit(self)
        box.setReadOnly(True)
        box.setAccessibleName(name)
        box.setTabChangesFocus(True)
        # Its own size hint would make the page scroll even while no row is open.
        box.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Ignored)
        box.setMinimumHeight(BOX_PX)
        return box
