"""Cards of a page in a grid of three columns, or in one column where that would be cramped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from PySide6.QtWidgets import QGridLayout, QWidget

WIDE_PX = 860
THIRDS = 3


def arrange(grid: QGridLayout, cards: Iterable[QWidget], shown: Sequence[tuple[QWidget, int]], *, wide: bool) -> None:
    """Shows some of the cards in this order, each spanning its number of columns, and hides the others."""
    for card in cards:
        grid.removeWidget(card)
        card.setVisible(any(card is one for one, _thirds in shown))
    for column in range(THIRDS):
        grid.setColumnStretch(column, 1 if wide else 0)
    row = at = 0
    for card, thirds in shown:
        span = thirds if wide else THIRDS
        if at + span > THIRDS:
            row, at = row + 1, 0
        grid.addWidget(card, row, at, 1, span)
        at += span
