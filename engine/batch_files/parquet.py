"""Parquet: a row group's part at a time, nested columns kept as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.batch_files.row import Row
from engine.errors import EngineError, ErrorCode

_ROWS_AT_ONCE = 256


class ParquetRows:
    """A row a record.

    Raises:
        EngineError: `INVALID_REQUEST`, if the file is not parquet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._opened() as file:
            self._columns = tuple(file.schema_arrow.names)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the file."""
        with self._opened() as file:
            return file.schema_arrow

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        with self._opened() as file:
            total = max(file.metadata.num_rows, 1)
            index = 0
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
                for fields in batch.to_pylist():
                    yield Row(index, fields, "", (index + 1) / total)
                    index += 1

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet

        try:
            with pa.parquet.ParquetFile(self._path) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{self._path} cannot be read as parquet ({str(error).splitlines()[0][:120]}): "
                f"check that it was written to its end and is not encrypted.",
            ) from None
