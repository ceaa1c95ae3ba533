"""The models that can be chosen for a chat, filtered by what is typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

CHOICE_ROLE = Qt.ItemDataRole.UserRole + 1
_Index = QModelIndex | QPersistentModelIndex
_NOWHERE = QModelIndex()


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One model.

    Attributes:
        name: what it is loaded by; `title` is shown.
        path: the checkpoint's folder or file.
        size_bytes: on the disk.
        precision: in words.
        origin: the program in whose store it lies; empty for the library's own.
        tokens_per_s: decode speed, measured or predicted; 0 if unknown.
        problem: why it cannot be used, in a sentence; else empty.
    """

    name: str
    title: str
    path: str
    size_bytes: int = 0
    precision: str = ""
    origin: str = ""
    tokens_per_s: float = 0.0
    is_measured: bool = False
    is_default: bool = False
    is_loaded: bool = False
    problem: str = ""


class ModelChoices(QAbstractListModel):
    """Rows of `ModelChoice`.

    Args:
        words: a choice in one line, for those who do not see how it is painted.
    """

    def __init__(self, words: Callable[[ModelChoice], str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._words = words
        self._all: list[ModelChoice] = []
        self._shown: list[ModelChoice] = []
        self._wanted: list[str] = []

    @property
    def all(self) -> tuple[ModelChoice, ...]:
        """With those that the filter hides."""
        return tuple(self._all)

    @property
    def shown(self) -> tuple[ModelChoice, ...]:
        return tuple(self._shown)

    def rowCount(self, parent: _Index = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self._shown)

    def data(self, index: _Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        choice = self._shown[index.row()]
        if role == CHOICE_ROLE:
            return choice
        if role == Qt.ItemDataRole.DisplayRole:
            return choice.title
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return self._words(choice)
        if role == Qt.ItemDataRole.ToolTipRole:
            return "\n".join(filter(None, (choice.title, choice.path, choice.problem)))
        return None

    def show(self, choices: Iterable[ModelChoice]) -> None:
        """Replaces all rows."""
        self._all = list(choices)
        self._filter()

    def set_filter(self, text: str) -> None:
        """Shows the models whose title or precision has every word of `text`."""
        self._wanted = text.casefold().split()
        self._filter()

    def set_speed(self, path: str, tokens_per_s: float, *, is_measured: bool) -> None:
        """Sets the speed of the model at a path."""
        for row, choice in enumerate(self._all):
            if choice.path == path:
                self._all[row] = replace(choice, tokens_per_s=tokens_per_s, is_measured=is_measured)
        for row, choice in enumerate(self._shown):
            if choice.path == path:
                self._shown[row] = replace(choice, tokens_per_s=tokens_per_s, is_measured=is_measured)
                self.dataChanged.emit(self.index(row), self.index(row))

    def _filter(self) -> None:
        self.beginResetModel()
        self._shown = [choice for choice in self._all if self._fits(choice)]
        self.endResetModel()

    def _fits(self, choice: ModelChoice) -> bool:
        text = f"{choice.title} {choice.precision}".casefold()
        return all(word in text for word in self._wanted)
