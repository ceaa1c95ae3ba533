"""A table of short texts: thin lines, whole rows selected, columns that share the width."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QAbstractTableModel, QEvent, QModelIndex, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView, QWidget

LINE_FACTOR = 1.9
LEAST_CHARACTERS = 10
"""Of a column that gets what the others leave."""


def show_whole_rows(table: QTableView, name: str) -> None:
    """Makes a table one of whole rows: no grid, no numbers before them, one row current, nothing edited in place."""
    table.setAccessibleName(name)
    table.setShowGrid(False)
    table.setTabKeyNavigation(False)
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
    table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
    table.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
    table.verticalHeader().hide()
    table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
    table.horizontalHeader().setHighlightSections(False)
    table.horizontalHeader().setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)


class TextTable(QTableView):
    """Signals: `opened`, index activated by key or click; `moved`, of the new current row; `left`, on Esc."""

    opened = Signal(QModelIndex)
    moved = Signal(QModelIndex)
    left = Signal()

    def __init__(self, model: QAbstractTableModel, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("table", "text")
        self.setModel(model)
        show_whole_rows(self, name)
        self.setWordWrap(False)
        self.setCornerButtonEnabled(False)
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.clicked.connect(self.opened)
        self.selectionModel().currentRowChanged.connect(lambda now, _before: self.moved.emit(now))
        self._fixed: Mapping[int, float] = {}
        self._spare = -1
        self._rows_shown: int | None = None
        self._fit_lines()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit_lines()
            self.share_width(self._fixed, self._spare)
            if self._rows_shown is not None:
                self.show_rows(self._rows_shown)

    def share_width(self, fixed: Mapping[int, float], spare: int = -1) -> None:
        """Sets these columns to a width in average characters, or if below 1 to this share of the table but no more
        than the columns that are left get; those share the rest.  `spare` is hidden where they would get too little."""
        self._fixed, self._spare = fixed, spare
        header = self.horizontalHeader()
        character, whole = self.fontMetrics().averageCharWidth(), self.viewport().width()
        widths = {column: round(width * character) + 18 for column, width in fixed.items() if width >= 1}
        shares = fixed.keys() - widths.keys()
        columns = self.model().columnCount()
        shown = columns - len(widths)
        even = (whole - sum(widths.values())) // max(shown, 1)
        if spare >= 0:
            self.setColumnHidden(spare, even < LEAST_CHARACTERS * character)
            even += widths[spare] // shown if self.isColumnHidden(spare) else 0
        widths |= {column: max(min(round(fixed[column] * whole), even), 0) for column in shares}
        for column in range(columns):
            if column in widths:
                header.setSectionResizeMode(column, QHeaderView.ResizeMode.Fixed)
                self.setColumnWidth(column, widths[column])
            else:
                header.setSectionResizeMode(column, QHeaderView.ResizeMode.Stretch)

    def resizeEvent(self, event: QResizeEvent) -> None:
        if any(width < 1 for width in self._fixed.values()):
            self.share_width(self._fixed, self._spare)
        super().resizeEvent(event)

    def _fit_lines(self) -> None:
        self.verticalHeader().setDefaultSectionSize(round(self.fontMetrics().lineSpacing() * LINE_FACTOR))

    def show_rows(self, rows: int) -> None:
        self._rows_shown = rows
        height = self.horizontalHeader().sizeHint().height() + rows * self.verticalHeader().defaultSectionSize() + 14
        self.setFixedHeight(height)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.currentIndex().isValid():
            self.opened.emit(self.currentIndex())
            return
        if event.key() == Qt.Key.Key_Escape:
            self.left.emit()
            return
        super().keyPressEvent(event)
