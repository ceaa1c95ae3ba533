"""A folder: the rows of all its supported files, sorted by name, with the file's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.batch_files.columns import SeenColumns
from engine.batch_files.row import Row, RowSource
from engine.common.errors import EngineError
from engine.common.foreign import reason


class FolderRows:
    """Rows of several files, each with a first column `file`."""

    def __init__(self, path: Path, files: Sequence[Path], open_file: Callable[[Path], RowSource]) -> None:
        self._path = path
        self._files = list(files)
        self._open = open_file
        columns = {"file": None}
        for file in self._files:
            try:
                columns |= dict.fromkeys(open_file(file).columns)
            except EngineError:  # reported in its row
                continue
        self._columns = tuple(columns)
        self._seen = SeenColumns(columns)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read, in order."""
        return tuple(self._files)

    def all_columns(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return self._seen.all_of(self.rows())

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        return self._seen.through(self._rows())

    def _rows(self) -> Iterator[Row]:
        index = 0
        for place, file in enumerate(self._files):
            name = file.relative_to(self._path).as_posix()
            try:
                for row in self._open(file).rows():
                    share = (place + row.share) / len(self._files)
                    yield Row(index, {**row.fields, "file": name}, row.problem, share)
                    index += 1
            except EngineError as error:
                yield Row(index, {"file": name}, f"cannot be read: {error.message}", (place + 1) / len(self._files))
                index += 1
            except OSError as error:
                yield Row(index, {"file": name}, f"cannot be read ({reason(error)})", (place + 1) / len(self._files))
                index += 1
