"""A thematic break."""

from __future__ import annotations

from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QWidget

from app.widgets.markdown_view.segments import Segment
from app.widgets.markdown_view.style import Style


class RuleLine(QWidget):
    """One thin line across the answer."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.containers = ""
        self._style: Style | None = None

    def begin(self, segment: Segment, style: Style) -> None:
        self.containers = segment.containers
        self._style = style
        self.update()

    def accepts(self, segment: Segment) -> bool:  # noqa: ARG002
        return False

    def height_for(self, width: int) -> int:  # noqa: ARG002
        return 9

    def browser(self) -> None:
        """It holds no text."""
        return

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        if self._style is not None:
            painter = QPainter(self)
            painter.fillRect(0, self.height() // 2, self.width(), 1, QColor(self._style.theme.border))
            painter.end()
