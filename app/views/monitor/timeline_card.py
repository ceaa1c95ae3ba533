"""The timeline in its card, with a line of text below."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QAbstractTableModel, QCoreApplication, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtWidgets import (
    QFrame,
    QHeaderView,
    QStackedWidget,
    QTableView,
    QWidget,
)

from app.services.history.gauges import Floats
from app.services.settings import Settings
from app.theme import use_tabular_figures
from app.widgets.page import note_keys
from app.widgets.scaffold import hbox, push_button, text_label, vbox
from app.widgets.timeline.lanes import LaneData, amount_text, lane_words
from app.widgets.timeline.navigator import timeline_keys
from app.widgets.timeline.view import TimelineView
from engine.common.lanes import Lane

MACHINE_SETTING = "monitor_machine_lanes"


translate = QCoreApplication.translate

Index = QModelIndex | QPersistentModelIndex


class LaneTable(QAbstractTableModel):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._rows: list[tuple[str, str, str, str]] = []

    def show_lanes(self, lanes: list[tuple[Lane, LaneData]]) -> None:
        rows = [row for lane, data in lanes for row in rows_of_lane(lane, data)]
        if len(rows) != len(self._rows):
            self.beginResetModel()
            self._rows = rows
            self.endResetModel()
        elif rows != self._rows:
            self._rows = rows
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, 3))

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else 4

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or index.row() >= len(self._rows):
            return None
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            return self._rows[index.row()][index.column()]
        if role == Qt.ItemDataRole.TextAlignmentRole and index.column():
            return int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        return None

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return (
                translate("Timeline", "Lane"),
                translate("Timeline", "Last"),
                translate("Timeline", "Average"),
                translate("Timeline", "Max"),
            )[section]
        return None


def rows_of_lane(lane: Lane, data: LaneData) -> list[tuple[str, str, str, str]]:
    """A lane's (name, last, average, maximum); none for phases, which have no values."""
    if lane.kind == "phase":
        return []
    series: list[tuple[str, Floats]] = []
    names = data.names if len(data.names) == len(data.values) else ("",) * len(data.values)
    for name, values in zip(names, data.values, strict=True):
        series.append((f"{lane_words(lane.title)}, {name}" if name else lane_words(lane.title), values))
    if data.line is not None:
        title = lane_words(lane.title)
        if lane.both_ways:
            title = translate("Timeline", "{0}, out").format(lane_words(lane.title))
        elif lane.kind != "rate":
            title = translate("Timeline", "{0}, whole machine").format(lane_words(lane.title))
        series.append((title, data.line))
    rows = []
    for title, values in series:
        known = values[np.isfinite(values)]
        figures = (float(values[-1]), float(known.mean()), float(known.max())) if len(known) else (np.nan,) * 3
        at_end, mean, most = (amount_text(lane, figure) for figure in figures)
        rows.append((title, at_end, mean, most))
    return rows


class TimelineCard(QFrame):
    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self.setProperty("card", "true")
        self.view = TimelineView(self)
        self.view.explain_lanes()
        note_keys(self.view, timeline_keys())
        self._hint = self.tr("Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.")
        self._said = text_label(self, self._hint, role="caption", wrap=True)
        self._said.setMinimumHeight(2 * self._said.fontMetrics().height())
        self._said.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        use_tabular_figures(self._said)
        self.machine = push_button(
            self,
            self.tr("Machine"),
            kind="chip",
            checkable=True,
            tip=self.tr("Lanes of the machine's own sensors, below the engine's"),
            name=self.tr("Show the machine's sensors"),
        )
        self.machine.setChecked(settings.get(MACHINE_SETTING, default=False))
        self.machine.toggled.connect(self._show_machine)
        self.view.set_shows_machine(self.machine.isChecked())
        self.table = QTableView(self)
        self._lanes = LaneTable(self)
        self.table.setModel(self._lanes)
        self.table.setAccessibleName(self.tr("Timeline as a table"))
        self.table.verticalHeader().hide()
        self.table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self.table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self._pages = QStackedWidget(self)
        self._pages.addWidget(self.view)
        self._pages.addWidget(self.table)
        self.as_table = push_button(
            self,
            self.tr("Table"),
            kind="chip",
            checkable=True,
            tip=self.tr("The same lanes as numbers"),
            name=self.tr("Show the lanes as a table"),
        )
        self.as_table.toggled.connect(self._show_table)
        self.foot = hbox((self._said, 1), self.as_table, self.machine)
        self.body = vbox((self._pages, 1), self.foot, into=self, margins=(16, 12, 12, 10), gap=4)
        self.view.said.connect(lambda text: self._said.setText(text or self._hint))

    def add_control(self, control: QWidget) -> None:
        self.foot.addWidget(control)

    def refresh_table(self) -> None:
        if self.as_table.isChecked():
            self._lanes.show_lanes(self.view.read_lanes())

    def _show_table(self, shows: bool) -> None:
        self._pages.setCurrentWidget(self.table if shows else self.view)
        self.refresh_table()

    def _show_machine(self, shows: bool) -> None:
        self._settings.set(MACHINE_SETTING, shows)
        self.view.set_shows_machine(shows)
