"""Downloads under way, wherever in the window one is: how many, and how far; a click leads to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QPushButton, QWidget

from app.icons import icon

if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download


class DownloadsMark(QPushButton):
    """Hidden while nothing is fetched, waits or has failed; in the icon rail its tooltip says how many and how far."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("kind", "navigation")
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self._is_rail = False
        self._words = ""
        self.setIcon(icon("download", "muted"))
        self.setAccessibleName(self.tr("Downloads"))
        self.hide()

    def show_downloads(self, downloads: Sequence[Download]) -> None:
        """Shows these; paused ones are left alone."""
        under_way = [one for one in downloads if one.state in ("running", "waiting")]
        failed = [one for one in downloads if one.state == "failed"]
        if under_way:
            total = sum(one.total_bytes for one in under_way)
            percent = 100 * sum(one.done_bytes for one in under_way) // total if total else 0
            count = len(under_way)
            self._words = (
                self.tr("1 download, {0}%").format(percent)
                if count == 1
                else self.tr("{0} downloads, {1}%").format(count, percent)
            )
        elif failed:
            self._words = self.tr("A download stopped")
        else:
            self._words = ""
        self.setVisible(bool(self._words))
        self._show_text()

    def set_narrow(self, narrow: bool) -> None:
        """For the icon rail."""
        self._is_rail = narrow
        self._show_text()

    def _show_text(self) -> None:
        self.setText("" if self._is_rail else f" {self._words}")
        self.setAccessibleName(self._words or self.tr("Downloads"))
        self.setToolTip(self.tr("{0}: show them").format(self._words))
