"""Parquet: read in batches of a row group, with nested columns unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.batch_files.row import Row
from engine.common.errors import EngineError, ErrorCode

_ROWS_AT_ONCE = 256


class ParquetRows:
    """One row per record.

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

    def all_columns(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return self.columns

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
        for batch in self.batches():
            columns = [_values(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                yield Row(index, dict(zip(self._columns, values, strict=True)), "", (index + 1) / total)
                index += 1

    def batches(self) -> Iterator[Any]:
        """The same rows as `pyarrow.RecordBatch`es of a few hundred rows."""
        with self._opened() as file:
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE)

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
                f"check that it is complete and not encrypted.",
            ) from None


def _values(column: Any) -> list[Any]:
    """A column as Python values, whose times have microsecond resolution."""
    try:
        return list(column.to_pylist())
    except ValueError:
        return list(column.cast(_in_microseconds(column.type), safe=False).to_pylist())


def _in_microseconds(kind: Any) -> Any:
    """An Arrow type with every nanosecond in it made a microsecond."""
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_struct(kind):
        return pa.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_type, _in_microseconds(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_in_microseconds(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return (pa.large_list if types.is_large_list(kind) else pa.list_)(_in_microseconds(kind.value_type))
    return kind
