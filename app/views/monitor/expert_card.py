"""The expert map in its card."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QSizePolicy, QSpacerItem, QTableView, QWidget

from app.widgets.expert_map.data import MapData, map_data
from app.widgets.expert_map.table import ExpertTable
from app.widgets.expert_map.view import ExpertMapView, MapLegend
from app.widgets.fields import Slider
from app.widgets.scaffold import Card, add_items, muted_label, push_button
from engine.common.errors import EngineError
from engine.telemetry.messages import ExpertMap

_COLUMN_DIGITS = (9, 10, 10, 8, 13, 10, 16)
"""Column widths in digits; a wider table scrolls."""


class ExpertCard(Card):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.heading.setText(self.tr("Expert map"))
        self.setAccessibleName(self.tr("Expert map"))
        self.explain(
            self.tr(
                "A model like this has many small parts in each layer, called experts, and every token uses only a few "
                "of them. Each square is one expert: the stronger its colour, the more it is used; its pattern shows "
                "where it is stored."
            )
        )
        self.by_use = push_button(
            self,
            self.tr("By use"),
            kind="chip",
            checkable=True,
            tip=self.tr("Sort each layer's experts by use instead of by number"),
        )
        self.as_table = push_button(
            self,
            self.tr("Table"),
            kind="chip",
            checkable=True,
            tip=self.tr("The same experts as numbers, sorted by any column"),
            name=self.tr("Show the experts as a table"),
        )
        add_items(self.head, self.by_use, self.as_table)
        self.view = ExpertMapView(self)
        self.legend = MapLegend(self)
        self.table = self._make_table()
        self._hint = muted_label(self)
        add_items(self.body, (self.view, 1), (self.table, 1), self.legend, self._hint)
        self._room = QSpacerItem(0, 0)
        self.body.addItem(self._room)
        self.by_use.toggled.connect(self.view.sort_by_use)
        self.as_table.toggled.connect(lambda: self._show_parts())
        self._event: ExpertMap | None = None
        self._data: MapData | None = None
        self._replayed: list[tuple[int, ExpertMap]] | None = None
        self.replay = Slider(self, name=self.tr("Time in the recorded session"))
        self.replay.setToolTip(self.tr("Scrubs through the session's maps"))
        self.replay.valueChanged.connect(self._show_replayed)
        self.replay.hide()
        self.body.insertWidget(3, self.replay)
        self.show_event(None)

    def show_recording(self, maps: list[tuple[int, ExpertMap]] | None) -> None:
        """A session's maps, with a slider to step through them; None for live data."""
        self._replayed = maps
        self.replay.setVisible(bool(maps) and len(maps or ()) > 1)
        if maps is not None:
            self.replay.setRange(0, max(0, len(maps) - 1))
            self.replay.setValue(len(maps) - 1)
            self._show_replayed()

    def _show_replayed(self) -> None:
        if self._replayed is not None:
            self._show(self._replayed[self.replay.value()][1] if self._replayed else None)

    def show_event(self, event: ExpertMap | None) -> None:
        """The latest map; ignored while a session is replayed."""
        if self._replayed is None:
            self._show(event)

    def _show(self, event: ExpertMap | None) -> None:
        """Shows a map; an invalid one counts as none."""
        if event is not None and event is self._event:
            return
        self._event = event
        data: MapData | None = None
        if event is not None:
            try:
                data = map_data(event)
            except EngineError:
                data = None
        self._data = data
        self.view.show_data(data)
        self.legend.show_data(data)
        self._show_parts()
        if data is None:
            self.caption.setText("")
            self._hint.setText(self.tr("Load a model with experts and ask something: each square is an expert."))
            return
        rows, columns = data.shape
        self.caption.setText(self.tr("{0} × {1}").format(rows, columns))
        self.caption.setToolTip(self.tr("{0} layers with {1} experts each").format(rows, columns))
        self.caption.setAccessibleName(self.caption.toolTip())

    def _show_parts(self) -> None:
        data, as_table = self._data, self.as_table.isChecked()
        self.experts.show_data(data if as_table else None)
        self.view.setVisible(data is not None and not as_table)
        self.table.setVisible(data is not None and as_table)
        self.legend.setVisible(data is not None and not as_table)
        self._hint.setVisible(data is None)
        self._room.changeSize(0, 0, QSizePolicy.Policy.Minimum, _growing(data is None))
        self.body.invalidate()
        self.by_use.setVisible(data is not None and not as_table)
        self.as_table.setVisible(data is not None)

    def _make_table(self) -> QTableView:
        table = QTableView(self)
        self.experts = ExpertTable(self)
        table.setModel(self.experts)
        table.setAccessibleName(self.tr("Experts as a table"))
        table.verticalHeader().hide()
        table.verticalHeader().setDefaultSectionSize(24)
        wide = table.fontMetrics().horizontalAdvance("0")
        for column, digits in enumerate(_COLUMN_DIGITS):  # no resizing to contents: there may be 60,000 rows
            table.setColumnWidth(column, digits * wide)
        table.horizontalHeader().setStretchLastSection(True)
        table.horizontalHeader().setSortIndicator(0, Qt.SortOrder.AscendingOrder)
        table.setSortingEnabled(True)
        table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        table.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        table.setMinimumHeight(160)
        return table


def _growing(grows: bool) -> QSizePolicy.Policy:
    return QSizePolicy.Policy.Expanding if grows else QSizePolicy.Policy.Fixed
