"""Which of several model folders downloads go into, with the room that each has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QWidget

from app.services.background import LatestTask
from app.services.downloads import FOLDER_KEY
from app.services.settings import Settings
from app.widgets.fields import ComboBox
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR, file_size
from app.widgets.scaffold import hbox, text_label
from engine.common.paths import models_dir

if TYPE_CHECKING:
    from engine.checkpoint.mounts import Room

LONGEST_NAME = 24


class FolderChoice(QWidget):
    """Hidden as long as there is only one folder; what is chosen holds for the next downloads, too.

    Signals:
    room_changed(Room): where downloads go now, whenever the folders were looked at or another one was chosen.
    """

    room_changed = Signal(object)

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._rooms: tuple[Room, ...] = ()
        self._looking = LatestTask(self)
        self.combo = ComboBox(self, name=self.tr("Download folder"))
        name = text_label(self, self.tr("Download to"), role="secondary", buddy=self.combo)
        self.combo.setSizeAdjustPolicy(ComboBox.SizeAdjustPolicy.AdjustToContents)
        hbox(Flow(name, self.combo, parent=self), into=self)
        self.combo.activated.connect(lambda _at: self._choose())
        self.hide()

    def look(self) -> None:
        """Looks for the folders, in the background: a disk may not answer."""
        self._looking.ask(_rooms, self.show_rooms)

    def show_rooms(self, rooms: tuple[Room, ...]) -> None:
        """Shows these folders; one whose disk is away cannot be chosen."""
        self._rooms = rooms
        chosen = self._settings.get(FOLDER_KEY, "") or str(models_dir())
        names = [room.folder.name for room in rooms if room.folder != models_dir()]
        self.combo.clear()
        for room in rooms:
            name = room.folder.name if names.count(room.folder.name) < 2 else "/".join(room.folder.parts[-2:])
            name = self.tr("Library") if room.folder == models_dir() else _cut(name or str(room.folder))
            words = self.tr("not connected") if room.free is None else self.tr("{0} free").format(file_size(room.free))
            self.combo.addItem(f"{name}{SEPARATOR}{words}", str(room.folder))
            at = self.combo.count() - 1
            self.combo.setItemData(at, room.trouble or str(room.folder), Qt.ItemDataRole.ToolTipRole)
            if room.free is None:
                self.combo.setItemData(at, 0, Qt.ItemDataRole.UserRole - 1)  # which disables an item
        self.combo.setCurrentIndex(max(0, self.combo.findData(chosen)))
        self._say_folder()
        self.setVisible(len(rooms) > 1)

    def close_down(self) -> None:
        self._looking.close()

    def _choose(self) -> None:
        folder = Path(self.combo.currentData())
        self._settings.set(FOLDER_KEY, "" if folder == models_dir() else str(folder))
        self._say_folder()

    def _say_folder(self) -> None:
        words = str(self.combo.currentData(Qt.ItemDataRole.ToolTipRole) or "")
        self.combo.setToolTip(words)
        self.combo.setAccessibleDescription(words)
        if 0 <= self.combo.currentIndex() < len(self._rooms):
            self.room_changed.emit(self._rooms[self.combo.currentIndex()])


def _cut(name: str) -> str:
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def _rooms() -> tuple[Room, ...]:
    from engine.checkpoint.model_directories import model_folders
    from engine.checkpoint.mounts import rooms_of

    return rooms_of(model_folders())
