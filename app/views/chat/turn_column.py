"""Turns one below the other, where one that grows costs the same in a long chat as in a short one.

A layout of Qt's asks every turn for its height whenever one has changed, which in a chat of 500 turns took most of the
time between two updates of an answer.
"""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QEvent, QMargins, QObject, QRect, QSize
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QSizePolicy, QWidget


class TurnColumn(QWidget):
    """Each turn is as wide as the column, or as it may be, and as high as it wants to be at that width.

    A turn whose own layout changes is asked again; the others are not.
    """

    def __init__(self, parent: QWidget, gap: int) -> None:
        super().__init__(parent)
        self._gap = gap
        self._margins = QMargins()
        self._turns: list[QWidget] = []
        self._heights: list[int] = []
        """0 where a turn has to be asked; all at `_width`."""
        self._width = 0
        self._placed = 0
        """So many of the first have their height and are where they belong."""
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)

    def insert(self, number: int, turn: QWidget) -> None:
        self._turns.insert(number, turn)
        self._heights.insert(number, 0)
        self._placed = min(self._placed, number)
        turn.installEventFilter(self)
        self._place_soon()
        turn.show()

    def remove(self, turn: QWidget) -> None:
        number = self._turns.index(turn)
        turn.removeEventFilter(self)
        del self._turns[number], self._heights[number]
        self._placed = min(self._placed, number)
        turn.hide()
        self._place_soon()

    def set_margins(self, margins: QMargins) -> None:
        if margins != self._margins:
            self._margins = margins
            self._ask_again()

    def place(self) -> None:
        self._measure(self.width())
        left = self._margins.left()
        top = self._margins.top()
        if self._placed:
            above = self._turns[self._placed - 1].geometry()
            top = above.bottom() + 1 + self._gap
        for turn, height in zip(self._turns[self._placed :], self._heights[self._placed :], strict=True):
            turn.setGeometry(QRect(left, top, min(self._width, turn.maximumWidth()), height))
            top += height + self._gap
        self._placed = len(self._turns)

    def heightForWidth(self, width: int) -> int:
        self._measure(width)
        gaps = self._gap * max(len(self._turns) - 1, 0)
        return self._margins.top() + sum(self._heights) + gaps + self._margins.bottom()

    def hasHeightForWidth(self) -> bool:
        return True

    def sizeHint(self) -> QSize:
        return QSize(self.width(), self.heightForWidth(self.width()))

    def minimumSizeHint(self) -> QSize:
        return QSize(self._margins.left() + self._margins.right(), 0)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.LayoutRequest and isinstance(watched, QWidget):
            number = self._number_of(watched)
            self._heights[number] = 0
            self._placed = min(self._placed, number)
        return False

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.LayoutRequest:
            self._update()
        return super().event(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.place()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._update()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.StyleChange, QEvent.Type.FontChange):
            self._ask_again()

    def _ask_again(self) -> None:
        self._heights = [0] * len(self._turns)
        self._placed = 0
        self._place_soon()

    def _place_soon(self) -> None:
        QCoreApplication.postEvent(self, QEvent(QEvent.Type.LayoutRequest))

    def _update(self) -> None:
        self.place()
        self.updateGeometry()  # the view gives it the height that it now wants

    def _number_of(self, turn: QWidget) -> int:
        last = len(self._turns) - 1
        return next(number for number in range(last, -1, -1) if self._turns[number] is turn)

    def _measure(self, width: int) -> None:
        inside = max(width - self._margins.left() - self._margins.right(), 0)
        if inside != self._width:
            self._width, self._placed = inside, 0
            self._heights = [0] * len(self._turns)
        for number in range(self._placed, len(self._turns)):
            if not self._heights[number]:
                turn = self._turns[number]
                wanted = turn.heightForWidth(min(inside, turn.maximumWidth()))
                if wanted < 0:  # as high at any width, like one that is being edited
                    wanted = turn.sizeHint().height()
                self._heights[number] = max(wanted, turn.minimumHeight(), 1)
