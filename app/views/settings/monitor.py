"""What the Monitor keeps on disk."""

from __future__ import annotations

from PySide6.QtWidgets import QCheckBox, QWidget

from app.services.settings import Settings
from app.services.telemetry_hub import RECORD_SETTING
from app.views.settings.card import SettingsCard


class MonitorCard(SettingsCard):
    """Whether sessions are recorded."""

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Monitor"))
        self.record = QCheckBox(self)
        self.record.setChecked(settings.get(RECORD_SETTING, default=True))
        self.record.toggled.connect(lambda on: settings.set(RECORD_SETTING, on))
        self.add_row(
            self.tr("Record sessions"),
            self.tr(
                "Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this "
                "machine and take up to 512 MB; the oldest are deleted."
            ),
            self.record,
        )
