"""Widgets in lines that wrap like words."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QRect, QSize, Qt
from PySide6.QtWidgets import QLayout, QLayoutItem, QSizePolicy, QWidget


class FlowLayout(QLayout):
    """Left to right; what does not fit wraps to the next line.

    With `ends_right` the last item is right-aligned if it shares a line with others.
    """

    def __init__(self, parent: QWidget | None = None, spacing: int = 6, *, ends_right: bool = False) -> None:
        super().__init__(parent)
        self._items: list[QLayoutItem] = []
        self._gap, self._ends_right = spacing, ends_right
        self._heights: dict[int, int] = {}  # Qt calls heightForWidth repeatedly, in a long conversation for every line
        self.setContentsMargins(0, 0, 0, 0)

    def addItem(self, item: QLayoutItem) -> None:
        self._items.append(item)

    def count(self) -> int:
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:
        return self._items[index] if 0 <= index < len(self._items) else None

    def move_last_to_front(self) -> None:
        self._items.insert(0, self._items.pop())

    def takeAt(self, index: int) -> QLayoutItem | None:
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:
        return Qt.Orientation(0)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        if width not in self._heights:
            self._heights[width] = self._arrange(QRect(0, 0, width, 0), move=False)
        return self._heights[width]

    def set_gap(self, gap: int) -> None:
        self._gap = gap
        self.invalidate()

    def invalidate(self) -> None:
        self._heights.clear()
        super().invalidate()

    def setGeometry(self, rect: QRect) -> None:
        super().setGeometry(rect)
        self._arrange(rect, move=True)

    def sizeHint(self) -> QSize:
        # All in one line: widgets beside it leave that much room if there is enough.
        hints = [item.sizeHint() for item in self._items if not item.isEmpty()]
        width = sum(hint.width() for hint in hints) + self._gap * max(0, len(hints) - 1)
        return QSize(width, max((hint.height() for hint in hints), default=0)).expandedTo(self.minimumSize())

    def minimumSize(self) -> QSize:
        size = QSize()
        for item in self._items:
            size = size.expandedTo(item.minimumSize())
        return size

    def _arrange(self, rect: QRect, *, move: bool) -> int:
        y = rect.y()
        for line in self._lines(rect.width()):
            sizes = [_size_within(item, rect.width()) for item in line]
            height = max(size.height() for size in sizes)
            x = rect.x()
            for item, size in zip(line, sizes, strict=True):
                if self._ends_right and item is self._items[-1] and item is not line[0]:
                    x = rect.right() + 1 - size.width()
                if move:
                    item.setGeometry(QRect(QPoint(x, y + (height - size.height()) // 2), size))
                x += size.width() + self._gap
            y += height + self._gap
        return max(0, y - self._gap - rect.y())

    def _lines(self, width: int) -> list[list[QLayoutItem]]:
        lines: list[list[QLayoutItem]] = []
        room = 0
        for item in self._items:
            widget = item.widget()
            if widget is not None and widget.isHidden():
                continue
            needed = item.sizeHint().width()
            if not lines or needed > room:
                lines.append([])
                room = width
            lines[-1].append(item)
            room -= needed + self._gap
        return lines


def _size_within(item: QLayoutItem, width: int) -> QSize:
    """What an item takes in a line of this width; one that is wider alone may wrap by itself."""
    size = item.sizeHint()
    if size.width() <= width:
        return size
    return QSize(width, item.heightForWidth(width) if item.hasHeightForWidth() else size.height())


class Flow(QWidget):
    """Holds widgets in lines that wrap.

    Its minimum height is one line: Qt would take the height at the minimum width, and leave a gap below.
    """

    def __init__(self, *widgets: QWidget, parent: QWidget, gap: int = 8, ends_right: bool = False) -> None:
        super().__init__(parent)
        self._lines = FlowLayout(self, gap, ends_right=ends_right)
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        for widget in widgets:
            self.add(widget)

    def add(self, widget: QWidget, *, first: bool = False) -> None:
        self._lines.addWidget(widget)
        if first:
            self._lines.move_last_to_front()

    @property
    def widgets(self) -> list[QWidget]:
        items = (self._lines.itemAt(at) for at in range(self._lines.count()))
        return [widget for item in items if item is not None and (widget := item.widget()) is not None]

    def set_gap(self, gap: int) -> None:
        self._lines.set_gap(gap)
        self.updateGeometry()

    def clear(self) -> None:
        while (item := self._lines.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.hide()
                widget.deleteLater()
        self.updateGeometry()

    @property
    def is_empty(self) -> bool:
        return not self._lines.count()

    def widest(self, room: int) -> int:
        return min(self._lines.sizeHint().width(), room)

    def sizeHint(self) -> QSize:
        return self._lines.sizeHint()

    def minimumSizeHint(self) -> QSize:
        return self._lines.minimumSize()
