"""What an empty chat shows: what to do first, and a few questions that a small model can answer."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget


class EmptyChat(QWidget):
    """Signals: `example_chosen`, the text of an example."""

    example_chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._greeting = QLabel(self.tr("Ask something to begin"), self)
        self._greeting.setObjectName("greeting")
        self._hint = QLabel(self)
        self._hint.setProperty("role", "secondary")
        self._hint.setWordWrap(True)
        for label in (self._greeting, self._hint):
            label.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        self.examples = [QPushButton(text, self) for text in self._texts()]
        grid = QGridLayout()
        grid.setSpacing(10)
        for number, button in enumerate(self.examples):
            button.setProperty("example", True)
            button.clicked.connect(lambda _=False, button=button: self.example_chosen.emit(button.text()))
            grid.addWidget(button, number // 2, number % 2)
        self._middle = QWidget(self)
        column = QVBoxLayout(self._middle)
        column.setContentsMargins(0, 0, 0, 0)
        column.addStretch(2)
        column.addWidget(self._greeting)
        column.addSpacing(6)
        column.addWidget(self._hint)
        column.addSpacing(22)
        column.addLayout(grid)
        column.addStretch(3)
        row = QHBoxLayout(self)
        row.setContentsMargins(24, 0, 24, 0)
        row.addStretch(1)
        row.addWidget(self._middle, 1000)
        row.addStretch(1)

    def set_hint(self, text: str) -> None:
        """The line under the greeting: what is happening, or what to expect."""
        self._hint.setText(text)

    def set_column_width(self, width: int) -> None:
        """Widest the examples may become."""
        self._middle.setMaximumWidth(width)

    @property
    def hint(self) -> str:
        return self._hint.text()

    def _texts(self) -> tuple[str, ...]:
        return (
            self.tr("What is the capital of France?"),
            self.tr("Give me five ideas for a healthy breakfast."),
            self.tr("Explain in two sentences why the sky is blue."),
            self.tr("Write a short poem about a night train."),
        )
