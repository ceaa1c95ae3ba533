"""Turns lie as if all had been asked how high they want to be, where only those that changed are."""

import random

import pytest
from PySide6.QtCore import QMargins
from PySide6.QtWidgets import QLabel, QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.views.chat.turn_column import TurnColumn

GAP, MARGINS = 20, QMargins(48, 26, 32, 20)
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "goes", "on")


class Turn(QWidget):
    """Text that wraps, in a layout of its own."""

    def __init__(self, text: str, most: int, parent: QWidget) -> None:
        super().__init__(parent)
        self.asked = 0
        self.label = QLabel(text)
        self.label.setWordWrap(True)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.label)
        self.setMaximumWidth(most)

    def heightForWidth(self, width: int) -> int:
        self.asked += 1
        return super().heightForWidth(width)


def area_with(qtbot: QtBot) -> QScrollArea:
    area = QScrollArea()
    qtbot.addWidget(area)
    area.setWidgetResizable(True)
    area.setWidget(TurnColumn(area, GAP))
    area.resize(700, 500)
    area.show()
    qtbot.waitExposed(area)
    return area


def some(random_: random.Random, most: int) -> str:
    return " ".join(random_.choices(WORDS, k=random_.randint(1, most)))


def asked_of_all(area: QScrollArea, turns: list[Turn]) -> list[tuple[int, ...]]:
    """Where they belong, found by asking all of them, and the size of the column at the end."""
    width = area.viewport().width()
    inside = width - MARGINS.left() - MARGINS.right()
    top, found = MARGINS.top(), []
    for turn in turns:
        wide = min(inside, turn.maximumWidth())
        high = turn.heightForWidth(wide) if turn.hasHeightForWidth() else turn.sizeHint().height()
        found.append((MARGINS.left(), top, wide, high))
        top += found[-1][3] + GAP
    return [*found, (width, max(top - GAP + MARGINS.bottom(), area.viewport().height()))]


@pytest.mark.parametrize("seed", range(4))
def test_turns_lie_where_all_of_them_together_would_lie(qtbot: QtBot, seed: int) -> None:
    random_ = random.Random(seed)
    area = area_with(qtbot)
    column = area.widget()
    column.set_margins(MARGINS)
    turns: list[Turn] = []

    def lies() -> list[tuple[int, ...]]:
        return [*(turn.geometry().getRect() for turn in turns), column.size().toTuple()]

    for _ in range(25):
        step, number = random_.random(), random_.randint(0, len(turns))
        if step < 0.5 or not turns:
            turns.insert(number, Turn(some(random_, 200), random_.choice((16_777_215, 560)), column))
            column.insert(number, turns[number])
        elif step < 0.65:
            gone = turns.pop(number - 1)
            column.remove(gone)
            gone.deleteLater()
        elif step < 0.85:
            turns[number - 1].label.setText(some(random_, 300))
        elif step < 0.87:
            turns[number - 1].label.setWordWrap(False)  # as high at any width
        elif step < 0.9:
            area.hide()
            turns[number - 1].label.setText(some(random_, 300))
            area.show()
        else:
            area.resize(random_.randint(300, 900), 500)
        qtbot.waitUntil(lambda: lies() == asked_of_all(area, turns))
