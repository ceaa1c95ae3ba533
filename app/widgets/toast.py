"""A short message at the bottom of the page that disappears after a while, with one action."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QFrame, QSizePolicy, QWidget

from app.widgets.scaffold import hbox, push_button, text_label, vbox

SHOWN_MS = 10_000
MARGIN_PX = 24


class Toast(QWidget):
    """Takes its own strip of the page's layout while shown, so that it covers nothing."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._do: Callable[[], object] = bool
        self._card = card = QFrame(self)
        card.setObjectName("toast")
        self._text = text_label(card)
        self._text.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        self._text.setWordWrap(True)
        self.button = push_button(card, do=self._on_button, kind="quiet")
        hbox((self._text, 1), self.button, into=card, margins=(16, 6, 6, 6), gap=12)
        vbox(card, into=self, margins=(MARGIN_PX, 8, MARGIN_PX, 10), gap=-1)
        self._timer = QTimer(self, singleShot=True, interval=SHOWN_MS)
        self._timer.timeout.connect(self.hide)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def set_widest(self, width: int) -> None:
        self.setMaximumWidth(width + 2 * MARGIN_PX)

    def show_text(self, text: str, action: str = "", do: Callable[[], object] = bool) -> None:
        """Show `text` for a while; the button runs `do`."""
        self._do = do
        self._text.setText(text)
        self.setAccessibleName(text)
        self.button.setText(action)
        self.button.setVisible(bool(action))
        self.show()
        self._timer.start()

    def _on_button(self) -> None:
        self.hide()
        self._do()
