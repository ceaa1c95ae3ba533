"""One row of an input file, and the interface of row sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Row:
    """A row, which becomes one prompt.

    Attributes:
        index: its position in the input, from 0; stable across reads.
        fields: value by column; values are JSON's types and those of parquet and spreadsheets (dates, decimals, bytes).
        problem: why it cannot be used, completing a sentence; empty if there is no problem.
        share: share of the input read up to this row, 0 to 1.
    """

    index: int
    fields: Mapping[str, Any]
    problem: str = ""
    share: float = 0.0


class RowSource(Protocol):
    """An input that streams its rows: only what the format requires is in memory.

    Attributes:
        path: the file or folder.
        columns: in order.  Rows may lack some; without a header, later rows may have more.
    """

    @property
    def path(self) -> Path: ...
    @property
    def columns(self) -> tuple[str, ...]: ...

    def all_columns(self) -> tuple[str, ...]:
        """The columns of all rows, including later ones; may read all rows."""
        ...

    def rows(self) -> Iterator[Row]:
        """All rows from the first; may be called again.

        Raises:
            EngineError: `INVALID_REQUEST`, if the content does not match the file type.
        """
        ...


def unique_names(names: list[str]) -> tuple[str, ...]:
    """Column names from a file's header, made non-empty and unique."""
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # last number tried per name: there may be thousands of duplicates
    result = []
    for place, name in enumerate(names, start=1):
        base = name.strip() or f"column_{place}"
        unique, number = base, numbers.get(base, 1)
        while unique in taken:
            number += 1
            unique = f"{base}_{number}"
        numbers[base] = number
        taken.add(unique)
        result.append(unique)
    return tuple(result)
