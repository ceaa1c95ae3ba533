"""A short message over the page that goes away by itself, with one thing to do about it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QObject, QTimer
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QWidget

SHOWN_MS = 10_000
MARGIN = 12


class Toast(QFrame):
    """Sits at the bottom of its parent, in the middle."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setObjectName("toast")
        self._do: Callable[[], object] = bool
        self._text = QLabel(self)
        self.button = QPushButton(self)
        self.button.setProperty("kind", "quiet")
        self.button.clicked.connect(self._on_button)
        row = QHBoxLayout(self)
        row.setContentsMargins(16, 6, 6, 6)
        row.setSpacing(12)
        row.addWidget(self._text)
        row.addWidget(self.button)
        self._timer = QTimer(self, singleShot=True, interval=SHOWN_MS)
        self._timer.timeout.connect(self.hide)
        parent.installEventFilter(self)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def tell(self, text: str, action: str = "", do: Callable[[], object] = bool) -> None:
        """Show `text` for a while; the button does `do`."""
        self._do = do
        self._text.setText(text)
        self.setAccessibleName(text)
        self.button.setText(action)
        self.button.setVisible(bool(action))
        self.adjustSize()
        self._place()
        self.show()
        self.raise_()
        self._timer.start()

    def eventFilter(self, _watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.Resize:
            self._place()
        return False

    def _on_button(self) -> None:
        self.hide()
        self._do()

    def _place(self) -> None:
        parent = self.parentWidget()
        if parent is not None:
            self.move((parent.width() - self.width()) // 2, parent.height() - self.height() - MARGIN)
