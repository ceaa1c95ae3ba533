"""The list of downloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QAbstractListModel, QMimeData, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal

if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download

DOWNLOAD_ROLE = Qt.ItemDataRole.UserRole + 1
_KIND = "application/x-switchyard-download"

Index = QModelIndex | QPersistentModelIndex


class DownloadList(QAbstractListModel):
    """Downloads in the order in which they are fetched; `DOWNLOAD_ROLE` gives a `Download`.  Rows can be dragged.

    Args:
        describe: a download in words, for screen readers.

    Signals:
        moved(str, int): the user wants the download of this key at this place.
    """

    moved = Signal(str, int)

    def __init__(self, describe: Callable[[Download], str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._describe = describe
        self._rows: tuple[Download, ...] = ()

    @property
    def rows(self) -> tuple[Download, ...]:
        return self._rows

    def show(self, downloads: tuple[Download, ...]) -> None:
        """Shows these; the current row stays current as long as the order is the same."""
        if [one.key for one in downloads] != [one.key for one in self._rows]:
            self.beginResetModel()
            self._rows = downloads
            self.endResetModel()
        elif downloads != self._rows:
            self._rows = downloads
            self.dataChanged.emit(self.index(0), self.index(len(downloads) - 1))

    def row_of(self, key: str) -> int:
        """A download's row; -1 if it is not there."""
        return next((at for at, one in enumerate(self._rows) if one.key == key), -1)

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        download = self._rows[index.row()]
        if role == DOWNLOAD_ROLE:
            return download
        if role == Qt.ItemDataRole.DisplayRole:
            return download.title
        if role in (Qt.ItemDataRole.AccessibleTextRole, Qt.ItemDataRole.ToolTipRole):
            return self._describe(download)
        return None

    # --- dragging -------------------------------------------------------------------------------------

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled  # between two rows, not onto one
        return super().flags(index) | Qt.ItemFlag.ItemIsDragEnabled

    def supportedDropActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:
        return [_KIND]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        data = QMimeData()
        data.setData(_KIND, self._rows[indexes[0].row()].key.encode())
        return data

    def dropMimeData(self, data: QMimeData, _action: Qt.DropAction, row: int, _column: int, _parent: Index) -> bool:
        key = bytes(data.data(_KIND).data()).decode()
        at = self.row_of(key)
        if at >= 0:
            place = len(self._rows) if row < 0 else row
            self.moved.emit(key, place - 1 if place > at else place)
        return False  # whoever wants it elsewhere changes the queue, which then is shown
