"""The base class of pages, and the window's registry entry for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

if TYPE_CHECKING:
    from app.services.services import Services

CHAT, BATCH, MONITOR, TUNE, MODELS, SETTINGS = "chat", "batch", "monitor", "tune", "models", "settings"
FIRST_RUN = "first-run"
"""In place of the chat as long as there is no model."""


class Page(QWidget):
    """Signals: `page_wanted(str)`: the user wants to go to the page of this name."""

    page_wanted = Signal(str)

    def open_files(self, paths: list[Path]) -> None:
        """Opens files that were double-clicked; most pages have no use for any."""

    def close_down(self) -> None:
        """Stops the page's background work before the window closes."""


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A page of the window.

    Attributes:
        name: of the page and its icon.
        label: shown to the user.
        make: called when the page is first shown, so that the window opens sooner.
    """

    name: str
    label: str
    make: Callable[[Services], Page]
