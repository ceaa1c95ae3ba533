"""An address that people may choose, kept when its field is left."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtWidgets import QLineEdit, QWidget

from app.services.background import TaskQueue

WIDTH_PX = 240


class AddressField(QLineEdit):
    """Its contents are what was kept, also after a change; one that cannot be used is left to be mended."""

    def __init__(
        self,
        kept: Callable[[], str],
        use: Callable[[str], str],
        doing: TaskQueue,
        tell: Callable[[Exception | None], object],
        parent: QWidget,
    ) -> None:
        """`use` keeps an address, in the background; `tell` gets why it could not be, or None for a new try."""
        super().__init__(kept(), parent)
        self._kept, self._use, self._doing, self._tell = kept, use, doing, tell
        self.setFixedWidth(WIDTH_PX)
        self.editingFinished.connect(self._leave)

    def _leave(self) -> None:
        address = self.text()
        self._tell(None)
        if address != self._kept():  # else the field was only left
            self._doing.add(lambda: self._use(address), self._on_kept, self._tell)

    def _on_kept(self, address: str) -> None:
        if not self.hasFocus():
            self.setText(address)
