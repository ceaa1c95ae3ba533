"""Rows of Parquet files and spreadsheets.

Parquet is read in batches of a row group, with nested columns unchanged; of an xlsx, the first sheet that has rows, and
its first row names the columns.
"""

from __future__ import annotations

import itertools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.batch_files.rows import FileRows, Row
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import open_foreign
from engine.common.sizes import about

_ROWS_AT_ONCE = 256


class ParquetRows(FileRows):
    """One row per record.

    Raises:
        EngineError: `INVALID_REQUEST`, if the file is not parquet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self._opened() as file:
            self._columns = self._named(file.schema_arrow.names)

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the file, with the names of `columns`."""
        import pyarrow as pa

        with self._opened() as file:
            fields = zip(file.schema_arrow, self._columns, strict=True)
            return pa.schema([field.with_name(name) for field, name in fields])

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


_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
MAX_UNPACKED_BYTES = 2 * 10**9
MAX_RATIO = 200
"""Sheets compress about 10:1; a much higher ratio is a zip bomb."""
_SMALL_BYTES = 50 * 10**6


class SpreadsheetRows(FileRows):
    """One row per non-empty line of the sheet.

    Raises:
        EngineError: `INVALID_REQUEST`: protected by a password, not an xlsx, a zip bomb, or without a header.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _refuse_what_is_no_sheet(path)
        first = next(self._values(), None)
        if first is None:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} has no sheet with rows: check the file.")
        self._columns = self._named(["" if value is None else str(value).strip() for value in first[1]])

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        values = self._values()
        next(values, None)
        for index in itertools.count():
            try:
                share, cells = next(values)
            except StopIteration:
                return
            except EngineError as error:
                yield Row(index, {}, f"and all later rows cannot be read ({error.message})", 1.0)
                return
            padded = [*cells, *([None] * (len(self._columns) - len(cells)))]
            problem = ""
            if any(value is not None for value in padded[len(self._columns) :]):
                problem = f"has cells beyond the {len(self._columns)} columns of the first row"
            yield Row(index, dict(zip(self._columns, padded, strict=False)), problem, share)

    def _values(self) -> Iterator[tuple[float, list[Any]]]:
        """Non-empty lines, the first of them the header, each with the share read so far."""
        with _opened(self._path) as book:
            for sheet in book.worksheets:
                some, lines = False, _lines(book, sheet)
                while True:
                    try:
                        line = next(lines, None)
                    except Exception as error:  # anything a damaged file makes the parsers raise
                        raise _no_sheet(self._path, error) from None
                    if line is None:
                        break
                    some = True
                    yield line
                if some:
                    return


_MOST_COLUMNS = 2**14
"""Of a sheet, as in spreadsheet programs."""


def _lines(book: Any, sheet: Any) -> Iterator[tuple[float, list[Any]]]:
    """Non-empty lines as they are in the file, without empty cells at the end.

    openpyxl's own rows end where the sheet says that it ends, which other programs write wrongly.
    """
    from openpyxl.worksheet._reader import WorkSheetParser

    size = max(book._archive.getinfo(sheet._worksheet_path).file_size, 1)
    with sheet._get_source() as source:
        formats = {"date_formats": book._date_formats, "timedelta_formats": book._timedelta_formats}
        parser = WorkSheetParser(source, sheet._shared_strings, data_only=True, epoch=book.epoch, **formats)
        for _number, cells in parser.parse():
            values = {cell["column"]: cell["value"] for cell in cells if cell["value"] is not None}
            last = max(values, default=0)
            if last > _MOST_COLUMNS:
                raise ValueError(f"a cell has a column above {_MOST_COLUMNS:,}")
            if values:
                line = [values.get(column) for column in range(1, last + 1)]
                yield min(1.0, source.tell() / size), [_unescaped(each) for each in line]


_ESCAPED = re.compile("_x([0-9A-Fa-f]{4})_")


def _unescaped(value: Any) -> Any:
    """A cell's text as spreadsheet programs show it: `_x000D_` is how they write a carriage return."""
    if not isinstance(value, str) or "_x" not in value:
        return value
    text = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), value)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _refuse_what_is_no_sheet(path: Path) -> None:
    with open_foreign(path) as file:
        start = file.read(8)
    if start == _OLE:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} is protected by a password or is an old .xls: save it as .xlsx without a password.",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise _no_sheet(path, error) from None
    packed = max(path.stat().st_size, 1)
    if unpacked > MAX_UNPACKED_BYTES or (unpacked > _SMALL_BYTES and unpacked > MAX_RATIO * packed):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} unpacks to {about(unpacked)} from {about(packed)} and may be a zip bomb: "
            f"save the sheet as csv if you trust it.",
        )


def _no_sheet(path: Path, error: BaseException) -> EngineError:
    return EngineError(
        ErrorCode.INVALID_REQUEST,
        f"{path} cannot be read as an xlsx sheet ({str(error)[:100] or type(error).__name__}): check the file.",
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import warnings

    from openpyxl.cell.text import Text
    from openpyxl.reader.excel import SHARED_STRINGS, ExcelReader
    from openpyxl.xml.constants import SHEET_MAIN_NS
    from openpyxl.xml.functions import iterparse

    class Reader(ExcelReader):  # type: ignore[misc,unused-ignore]
        def read_strings(self) -> None:
            """The shared strings as they are: openpyxl unescapes half of what is escaped in them."""
            content = self.package.find(SHARED_STRINGS)
            if content is None:
                return
            with self.archive.open(content.PartName[1:]) as source:
                for _event, node in iterparse(source):
                    if node.tag == f"{{{SHEET_MAIN_NS}}}si":
                        self.shared_strings.append(Text.from_tree(node).content)
                        node.clear()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about styles and extensions, which do not affect rows
            reader = Reader(path, read_only=True, data_only=True)
            reader.read()
            book = reader.wb
    except Exception as error:  # anything a damaged file makes the parsers raise
        raise _no_sheet(path, error) from None
    try:
        yield book
    finally:
        book.close()
