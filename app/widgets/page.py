"""What the pages of the window have in common, and what the window knows of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

if TYPE_CHECKING:
    from app.services.services import Services

CHAT, BATCH, MONITOR, TUNE, MODELS, SETTINGS = "chat", "batch", "monitor", "tune", "models", "settings"


class Page(QWidget):
    """Signals: `page_wanted(str)`: the user wants to see the page of this name."""

    page_wanted = Signal(str)

    def close_down(self) -> None:
        """Before the window goes: ends what the page does in the background."""


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A page of the window.

    Attributes:
        name: what the page and its icon are called.
        label: for people.
        make: called once, when the page is first wanted, so that the window opens sooner.
    """

    name: str
    label: str
    make: Callable[[Services], Page]
