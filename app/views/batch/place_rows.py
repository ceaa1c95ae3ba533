"""Where a running job's rows are answered: each place in a line, with its rate, its rows, its cost, or why it rests."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.theme import set_look, use_tabular_figures
from app.views.batch.phrases import cost_text, place_name, place_text
from app.widgets.chip import ElidedLabel
from app.widgets.quantities import count
from engine.batch_files.job_watcher import PlacePace

_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter


class PlaceRows(QWidget):
    """A small table; hidden while there is only this PC."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(18)
        self._grid.setVerticalSpacing(4)
        self._grid.setColumnStretch(1, 1)
        self._lines: list[tuple[QLabel, ElidedLabel, QLabel, QLabel]] = []
        self.setAccessibleName(self.tr("Who answers the rows"))
        self.hide()

    def show_places(self, places: Sequence[PlacePace]) -> None:
        """Shows these places."""
        while len(self._lines) < len(places):
            self._add_line()
        for line, place in zip(self._lines, places, strict=False):
            name, state, rows, cost = line
            name.setText(place_name(place))
            name.setToolTip(place.host)
            state.set_full_text(place_text(place))
            set_look(state, "tone", "warning" if place.state == "out" else "")
            rows.setText(self.tr("1 row") if place.rows == 1 else self.tr("{0} rows").format(count(place.rows)))
            cost.setText(cost_text(place))
        costs = any(place.cost is not None for place in places)  # else its column would leave a gap at the right
        for number, line in enumerate(self._lines):
            for label in line:
                label.setVisible(number < len(places) and (costs or label is not line[-1]))
        self.setVisible(bool(places))
        self.setAccessibleDescription(
            ". ".join(f"{place_name(place)}: {place_text(place)}, {count(place.rows)}" for place in places)
        )

    def _add_line(self) -> None:
        at = len(self._lines)
        name, state, rows, cost = QLabel(self), ElidedLabel(self), QLabel(self), QLabel(self)
        for label in (state, rows, cost):
            label.setProperty("role", "secondary")
        for label in (rows, cost):
            label.setAlignment(_RIGHT)
            use_tabular_figures(label)
        for column, label in enumerate((name, state, rows, cost)):
            self._grid.addWidget(label, at, column)
        self._lines.append((name, state, rows, cost))
