"""The system prompt of one chat."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QLabel, QWidget

from app.widgets.popover import Popover
from app.widgets.text_box import TextBox


class SystemPromptPopover(Popover):
    """Signals: `changed`, the text after every edit."""

    changed = Signal(str)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(self.tr("System prompt"), parent)
        hint = QLabel(self.tr("Instructions the model reads first, such as who it is and how to answer."), self)
        hint.setProperty("role", "secondary")
        hint.setWordWrap(True)
        self.text = TextBox(self)
        self.text.setPlaceholderText(self.tr("You are a helpful assistant that answers in one sentence."))
        self.text.setAccessibleName(self.tr("System prompt"))
        self.text.setTabChangesFocus(True)
        self.text.setMinimumSize(380, 130)
        self.text.textChanged.connect(lambda: self.changed.emit(self.text.toPlainText()))
        self.column.addWidget(hint)
        self.column.addWidget(self.text)

    def edit(self, system_prompt: str, button: QWidget) -> None:
        """Open with this text."""
        self.text.blockSignals(True)
        self.text.setPlainText(system_prompt)
        self.text.blockSignals(False)
        self.open_at(button)
        self.text.setFocus()
