"""The icon in the desktop's tray: whether it is there, and whether the program stays when its window closes."""

from __future__ import annotations

from PySide6.QtWidgets import QCheckBox, QSystemTrayIcon, QWidget

from app.services.settings import Settings
from app.views.settings.card import SettingsCard


class TrayCard(SettingsCard):
    """Changes hold at once."""

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Quick question"))
        is_there = QSystemTrayIcon.isSystemTrayAvailable()
        self.icon = QCheckBox(self)
        self.icon.setChecked(settings.tray)
        self.icon.setEnabled(is_there or settings.tray)
        words = self.tr("A click on it asks a question from anywhere, in a small window above the others.")
        if not is_there:
            words = self.tr("This desktop has no tray for icons.")
        self.add_row(self.tr("Icon in the tray"), words, self.icon)
        self.stays = QCheckBox(self)
        self.stays.setChecked(settings.stays_in_tray)
        self.add_row(
            self.tr("Keep running when the window is closed"),
            self.tr(
                "The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q."
            ),
            self.stays,
        )

        def set_tray(on: bool) -> None:
            settings.tray = on
            self.stays.setEnabled(on)

        def set_stays(on: bool) -> None:
            settings.stays_in_tray = on

        self.icon.toggled.connect(set_tray)
        self.stays.toggled.connect(set_stays)
        self.stays.setEnabled(self.icon.isChecked())
