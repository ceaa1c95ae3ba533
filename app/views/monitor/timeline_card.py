"""The timeline in its card, with a line of text below."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QHeaderView,
    QLabel,
    QPushButton,
    QStackedWidget,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.services.settings import Settings
from app.theme import use_tabular_figures
from app.widgets.shortcuts import note_keys
from app.widgets.timeline.keys import timeline_keys
from app.widgets.timeline.table import LaneTable
from app.widgets.timeline.view import TimelineView

MACHINE_SETTING = "monitor_machine_lanes"


class TimelineCard(QFrame):
    """`view` is the timeline."""

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self.setProperty("card", "true")
        self.view = TimelineView(self)
        self.view.explain_lanes()
        note_keys(self.view, timeline_keys())
        self._hint = self.tr("Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.")
        self._said = QLabel(self._hint, self)
        self._said.setProperty("role", "caption")
        self._said.setWordWrap(True)
        self._said.setMinimumHeight(2 * self._said.fontMetrics().height())
        self._said.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
        use_tabular_figures(self._said)
        self.machine = QPushButton(self.tr("Machine"), self)
        self.machine.setProperty("kind", "chip")
        self.machine.setCheckable(True)
        self.machine.setToolTip(self.tr("Lanes of the machine's own sensors, below the engine's"))
        self.machine.setAccessibleName(self.tr("Show the machine's sensors"))
        self.machine.setChecked(settings.get(MACHINE_SETTING, default=False))
        self.machine.toggled.connect(self._show_machine)
        self.view.set_shows_machine(self.machine.isChecked())
        self.foot = QHBoxLayout()
        self.foot.setContentsMargins(0, 0, 0, 0)
        self.foot.setSpacing(8)
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
        self.as_table = QPushButton(self.tr("Table"), self)
        self.as_table.setProperty("kind", "chip")
        self.as_table.setCheckable(True)
        self.as_table.setToolTip(self.tr("The same lanes as numbers"))
        self.as_table.setAccessibleName(self.tr("Show the lanes as a table"))
        self.as_table.toggled.connect(self._show_table)
        self.foot.addWidget(self._said, 1)
        self.foot.addWidget(self.as_table)
        self.foot.addWidget(self.machine)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(16, 12, 12, 10)
        self.body.setSpacing(4)
        self.body.addWidget(self._pages, 1)
        self.body.addLayout(self.foot)
        self.view.said.connect(lambda text: self._said.setText(text or self._hint))

    def add_control(self, control: QWidget) -> None:
        """Adds a button beside those below the lanes."""
        self.foot.addWidget(control)

    def refresh_table(self) -> None:
        """Updates the table if it is shown instead of the timeline."""
        if self.as_table.isChecked():
            self._lanes.show_lanes(self.view.read_lanes())

    def _show_table(self, shows: bool) -> None:
        self._pages.setCurrentWidget(self.table if shows else self.view)
        self.refresh_table()

    def _show_machine(self, shows: bool) -> None:
        self._settings.set(MACHINE_SETTING, shows)
        self.view.set_shows_machine(shows)
