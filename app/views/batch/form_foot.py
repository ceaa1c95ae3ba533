"""The line below the form for a new job: the plan, or what is missing, and Start."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app.widgets.card import muted_label, set_message, warning_label


class FormFoot(QWidget):
    """Signals: `start_wanted`, `cancelled`: the buttons."""

    start_wanted = Signal()
    cancelled = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("formFoot")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.plan = muted_label(self)
        self.trouble = warning_label(self)
        self.cancel = QPushButton(self.tr("Cancel"), self)
        self.cancel.clicked.connect(self.cancelled)
        self.start = QPushButton(self.tr("Start"), self)
        self.start.setProperty("kind", "primary")
        self.start.clicked.connect(self.start_wanted)
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(self.trouble)
        words.addWidget(self.plan)
        line = QHBoxLayout(self)
        line.setContentsMargins(20, 10, 20, 10)
        line.setSpacing(12)
        line.addLayout(words, 1)
        line.addWidget(self.cancel)
        line.addWidget(self.start)

    def show_state(self, *, able: bool, checking: bool, why_not: str, words: str) -> None:
        """Shows whether the job can be started.

        Args:
            why_not: a sentence, if it cannot.
            words: the plan, or what is missing.
        """
        self.start.setEnabled(able and not checking)
        self.start.setText(self.tr("Checking…") if checking else self.tr("Start"))
        self.start.setToolTip(why_not)
        set_message(self.plan, words)
