"""Rows of Parquet files and spreadsheets.

Parquet is read in batches of a row group, with nested columns unchanged; of an xlsx, the first sheet that has rows and
is not hidden, and its first row names the columns.
"""

from __future__ import annotations

import itertools
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.batch_files.rows import TOLD, Row, RowSource, unique_names
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line, quoted
from engine.common.sizes import about
from engine.common.untrusted import open_untrusted, without_half_pairs

_ROWS_AT_ONCE = 256


class ParquetRows(RowSource):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self._opened() as file:
            self.columns = self._named(file.schema_arrow.names)

    @property
    def schema(self) -> Any:
        """The `pyarrow.Schema` of the file, with the names of `columns`."""
        import pyarrow as pa

        with self._opened() as file:
            fields = zip(file.schema_arrow, self.columns, strict=True)
            return pa.schema([field.with_name(name) for field, name in fields])

    def rows(self) -> Iterator[Row]:
        with self._opened() as file:
            total = max(file.metadata.num_rows, 1)
        index = 0
        for batch in self.batches():
            columns = [_values(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                yield Row(index, dict(zip(self.columns, values, strict=True)), "", (index + 1) / total)
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
            with pa.parquet.ParquetFile(self.path) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{self.path} cannot be read as parquet ({str(error).splitlines()[0][:120]}): "
                f"check that it is complete and not encrypted.",
            ) from None


def _values(column: Any) -> list[Any]:
    """A column as Python values."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    """One value, also where Python has none like it: times are in microseconds, and what no date can be is text."""
    import pyarrow as pa

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_dictionary(kind):
        return _value(scalar.value)
    if pa.types.is_struct(kind):
        names = unique_names([field.name for field in kind])
        return {name: _value(scalar[at]) for at, name in enumerate(names)}
    if pa.types.is_map(kind):
        return [(_value(pair[0]), _value(pair[1])) for pair in scalar.values]
    if pa.types.is_nested(kind):
        return [_value(entry) for entry in scalar.values]
    try:
        if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
            fits = pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.duration("us")
            return scalar.cast(fits, safe=False).as_py()
        if pa.types.is_time64(kind):
            return scalar.cast(pa.time64("us"), safe=False).as_py()
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes().decode("utf-8", "replace")
    except (ValueError, OverflowError, pa.ArrowException):
        return _as_written(scalar)


def _as_written(scalar: Any) -> str:
    """A date or time that Python cannot hold, as text: by its number if there is no better one."""
    import pyarrow as pa

    try:
        return str(scalar.cast(pa.string()).as_py())
    except (ValueError, pa.ArrowException):
        return str(scalar.value)


_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
MAX_UNPACKED_BYTES = 2 * 10**9
MAX_RATIO = 200
"""Sheets compress about 10:1; a much higher ratio is a zip bomb."""
_SMALL_BYTES = 50 * 10**6


class SpreadsheetRows(RowSource):
    """One row per non-empty line of a sheet.

    Args:
        sheet: its name; None: the first one that has rows.

    Attributes:
        sheet: its name.
        sheet_names: of all that have rows and are shown.
    """

    def __init__(self, path: Path, sheet: str | None = None) -> None:
        super().__init__(path)
        _refuse_what_is_no_sheet(path)
        with _opened(path) as book:
            first = {each.title: line[1] for each in _sheets(book) if (line := next(self._lines(book, each), None))}
        if not first:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} has no sheet with rows: check the file.")
        self.sheet_names = tuple(first)
        self.sheet = self.sheet_names[0] if sheet is None else sheet
        if self.sheet not in first:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{path} has no sheet {quoted(self.sheet[:60])} with rows: choose {_listed(self.sheet_names)}.",
            )
        header, unread = first[self.sheet], [name for name in first if name != self.sheet]
        self.columns = self._named(["" if value in _NONE else str(value).strip() for value in header])
        if unread:
            names = ", ".join(map(quoted, unread[:TOLD]))
            more = f" and {len(unread) - TOLD:,} more" if len(unread) > TOLD else ""
            self.remark = f"{self.remark} Other sheets of {plain_line(path.name)} were not read: {names}{more}.".strip()

    def rows(self) -> Iterator[Row]:
        lines = self._values()
        next(lines, None)
        for index in itertools.count():
            try:
                share, cells = next(lines)
            except StopIteration:
                return
            except EngineError as error:
                yield Row(index, {}, f"and all later rows cannot be read ({error.message})", 1.0)
                return
            padded = [*cells, *([None] * (len(self.columns) - len(cells)))]
            problem = ""
            if any(value is not None for value in padded[len(self.columns) :]):
                problem = f"has cells beyond the {len(self.columns)} columns of the first row"
            elif _UNCOMPUTED in padded:
                problem = "has a formula without its result; open the file in a spreadsheet program and save it"
            values = (None if value is _UNCOMPUTED else value for value in padded)
            yield Row(index, dict(zip(self.columns, values, strict=False)), problem, share)

    def sheets(self) -> Iterator[tuple[str, Iterator[list[Any]]]]:
        """All sheets that are shown: the name and the non-empty lines of each."""
        with _opened(self.path) as book:
            for sheet in _sheets(book):
                lines = (line for _share, line in self._lines(book, sheet))
                yield sheet.title, ([None if value in _NONE else value for value in line] for line in lines)

    def _values(self) -> Iterator[tuple[float, list[Any]]]:
        """Non-empty lines, the first of them the header, each with the share read so far."""
        with _opened(self.path) as book:
            chosen = next((sheet for sheet in _sheets(book) if sheet.title == self.sheet), None)
            if chosen is not None:
                yield from self._lines(book, chosen)

    def _lines(self, book: Any, sheet: Any) -> Iterator[tuple[float, list[Any]]]:
        try:
            yield from _lines(book, sheet)
        except Exception as error:  # anything a damaged file makes the parsers raise
            raise _no_sheet(self.path, error) from None


def _listed(names: tuple[str, ...]) -> str:
    shown = [quoted(name[:60]) for name in names[:TOLD]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


_MOST_COLUMNS = 2**14
"""Of a sheet, as in spreadsheet programs."""


_UNCOMPUTED = "=\x00"
"""Stands for the result of a formula that the program that wrote the file did not compute.  XML cannot hold it."""
_NONE = (None, _UNCOMPUTED)


def _sheets(book: Any) -> list[Any]:
    """Those that are shown, or all if none is."""
    return [sheet for sheet in book.worksheets if sheet.sheet_state == "visible"] or book.worksheets


def _lines(book: Any, sheet: Any) -> Iterator[tuple[float, list[Any]]]:
    """Non-empty lines as they are in the file, without empty cells at the end.

    openpyxl's own rows end where the sheet says that it ends, which other programs write wrongly.
    """
    from openpyxl.worksheet._reader import FORMULA_TAG, ROW_TAG, VALUE_TAG, WorkSheetParser
    from openpyxl.xml.functions import iterparse

    class Parser(WorkSheetParser):  # type: ignore[misc,unused-ignore]
        def parse_cell(self, element: Any) -> Any:
            cell = super().parse_cell(element)
            is_empty_text = element.get("t") == "str"  # the result of a formula can be one
            if not element.findtext(VALUE_TAG) and not is_empty_text and element.find(FORMULA_TAG) is not None:
                cell["value"] = _UNCOMPUTED
            return cell

    size = max(book._archive.getinfo(sheet._worksheet_path).file_size, 1)
    with sheet._get_source() as source:
        formats = {"date_formats": book._date_formats, "timedelta_formats": book._timedelta_formats}
        parser = Parser(source, sheet._shared_strings, data_only=True, epoch=book.epoch, **formats)
        for _event, element in iterparse(source):
            if element.tag != ROW_TAG:  # filters, margins and all else may be wrong: nothing here depends on them
                continue
            _number, cells = parser.parse_row(element)
            element.clear()
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
    return without_half_pairs(_ESCAPED.sub(lambda match: chr(int(match[1], 16)), value))


def _refuse_what_is_no_sheet(path: Path) -> None:
    with open_untrusted(path) as file:
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
    from openpyxl.reader.excel import SHARED_STRINGS, ExcelReader, apply_stylesheet
    from openpyxl.xml.constants import SHEET_MAIN_NS
    from openpyxl.xml.functions import iterparse

    class Reader(ExcelReader):  # type: ignore[misc,unused-ignore]
        def read(self) -> None:
            """What rows depend on, and nothing else: other programs write themes, names and properties wrongly."""
            self.read_manifest()
            self.read_strings()
            self.read_workbook()
            apply_stylesheet(self.archive, self.wb)
            self.read_worksheets()

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

        def read_chartsheet(self, sheet: Any, rel: Any) -> None:
            """Nothing: it has no rows."""

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
