"""The models on this PC as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject

from app.models.headed_table import ROW_ROLE, HeadedTable

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry
    from engine.common.model_info import ModelInfo

__all__ = ["ROW_ROLE", "Column", "LibraryTable", "ModelRow", "with_opened"]


class Column(IntEnum):
    NAME = 0
    ORIGIN = 1
    SIZE = 2
    PRECISION = 3
    SPEED = 4
    USED = 5


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model as the table shows it."""

    entry: LibraryEntry
    is_loaded: bool = False
    is_default: bool = False
    predicted: float | None = None
    remote: str = ""
    place: str = ""
    heading: str = ""

    @property
    def key(self) -> str:
        return self.remote or str(self.entry.path)


class LibraryTable(HeadedTable):
    """`ROW_ROLE` gives the `ModelRow`; `describe` puts one into words, for screen readers.

    Args:
        words: the text of a cell.
    """

    def __init__(
        self,
        headings: tuple[str, ...],
        words: Callable[[ModelRow, Column], str],
        describe: Callable[[ModelRow], str],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(
            headings,
            (Column.SIZE, Column.SPEED),
            parent,
            cell=lambda row, column: words(row, Column(column)),
            describe=describe,
            key=lambda row: row.key,
        )

    def show(
        self,
        entries: tuple[LibraryEntry, ...],
        *,
        loaded: str,
        default: str,
        predicted: Mapping[str, float],
        elsewhere: tuple[ModelRow, ...] = (),
    ) -> None:
        here = tuple(
            ModelRow(
                entry,
                is_loaded=bool(loaded) and loaded in _places(entry),
                is_default=default == entry.name or default in _places(entry),
                predicted=predicted.get(str(entry.path)),
            )
            for entry in entries
        )
        self.show_rows((*here, *elsewhere))

    def row_of(self, key: object) -> int:
        rows = enumerate(self._rows)
        return next((at for at, row in rows if key == row.key or (not row.remote and key in _places(row.entry))), -1)


def with_opened(
    entries: tuple[LibraryEntry, ...], model: ModelInfo | None, default: str = ""
) -> tuple[LibraryEntry, ...]:
    """Also the model that is loaded, where it was opened from outside the library.

    Args:
        default: taken if none is loaded; only the path of one counts.
    """
    path = model.path if model is not None else default if Path(default).is_absolute() else ""
    if not path or any(path in _places(entry) for entry in entries):
        return entries
    from engine.checkpoint.library import LibraryEntry  # imported late: it is slow to load

    name, precision = (model.name, model.precision_words) if model is not None else (Path(path).stem, "")
    return (LibraryEntry(name, Path(path), precision_words=precision, origin="folder"), *entries)


def _places(entry: LibraryEntry) -> tuple[str, ...]:
    return str(entry.path), *(str(path) for _origin, path in entry.also)
