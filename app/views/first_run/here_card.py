"""Models that other programs have left on this PC, to be used where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app.widgets.card import Card, muted_label
from app.widgets.chip import ElidedLabel
from app.widgets.quantities import file_size

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry

MOST_ROWS = 3


class HereCard(Card):
    """The largest few; hidden if there are none.

    Signals:
        chosen(LibraryEntry): to be used from now on.
    """

    chosen = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Already on this PC"))
        self._shown: tuple[LibraryEntry, ...] = ()
        self._rows: list[QWidget] = []
        self._more = muted_label(self)
        self.body.addWidget(self._more)
        self.hide()

    @property
    def buttons(self) -> tuple[QPushButton, ...]:
        return tuple(button for row in self._rows for button in row.findChildren(QPushButton))

    def show_models(self, entries: Sequence[LibraryEntry]) -> None:
        """Shows those that can be used."""
        usable = sorted((one for one in entries if not one.problem), key=lambda one: -one.bytes_on_disk)
        if tuple(usable) != self._shown:
            self._shown = tuple(usable)
            for row in self._rows:
                self.body.removeWidget(row)
                row.hide()
                row.deleteLater()
            self._rows = [self._row(entry) for entry in usable[:MOST_ROWS]]
            for at, row in enumerate(self._rows):
                self.body.insertWidget(1 + at, row)
            rest = len(usable) - len(self._rows)
            one, more = self.tr("One more is on the Models page."), self.tr("{0} more are on the Models page.")
            self._more.setText(one if rest == 1 else more.format(rest))
            self._more.setVisible(rest > 0)
        self.setVisible(bool(usable))

    def _row(self, entry: LibraryEntry) -> QWidget:
        row = QWidget(self)
        name = ElidedLabel(row)
        name.setProperty("tone", "head")
        name.set_full_text(entry.name)
        where = entry.origin if entry.is_in_place else ""
        about = ElidedLabel(row)
        about.setProperty("role", "secondary")
        about.set_full_text(" · ".join(filter(None, (file_size(entry.bytes_on_disk), entry.precision_words, where))))
        button = QPushButton(self.tr("Use"), row)
        button.setAccessibleName(self.tr("Use {0}").format(entry.name))
        button.clicked.connect(lambda: self.chosen.emit(entry))
        words = QVBoxLayout()
        words.setSpacing(0)
        words.addWidget(name)
        words.addWidget(about)
        line = QHBoxLayout(row)
        line.setContentsMargins(0, 0, 0, 0)
        line.setSpacing(12)
        line.addLayout(words, 1)
        line.addWidget(button)
        return row
