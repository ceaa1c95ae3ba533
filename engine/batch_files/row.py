"""One row of an input file, and where rows come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Row:
    """A row, which becomes one prompt.

    Attributes:
        index: its place in the input, from 0; the same each time the file is read.
        fields: value by column; values are what JSON knows, and what parquet and spreadsheets have besides (dates,
            decimals, bytes).
        problem: why it cannot be asked, as the end of a sentence; empty if nothing is wrong with it.
        share: how much of the input has been read with this row, 0 to 1.
    """

    index: int
    fields: Mapping[str, Any]
    problem: str = ""
    share: float = 0.0


class RowSource(Protocol):
    """An input whose rows stream: nothing is held but what the format forces.

    Attributes:
        path: the file or folder.
        columns: of every row, in order.  A row may lack some; where no header names them, later rows may have more.
    """

    @property
    def path(self) -> Path: ...
    @property
    def columns(self) -> tuple[str, ...]: ...

    def all_columns(self) -> tuple[str, ...]:
        """The same with those that only later rows have; may read all rows."""
        ...

    def rows(self) -> Iterator[Row]:
        """All rows from the first on; may be called again.

        Raises:
            EngineError: `INVALID_REQUEST`, where the file is not what its name says.
        """
        ...


def unique_names(names: list[str]) -> tuple[str, ...]:
    """Column names as a file's header gives them, none empty and none twice."""
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # the last one tried of each name: there may be thousands of equal ones
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
