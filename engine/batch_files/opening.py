"""Opens an input file or folder by its name.

The text of a pdf, docx or HTML page is one row; a folder is the rows of all its supported files, sorted by name, with
the file's name. A text file in a folder is one row, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from engine.batch_files.documents import DOCUMENTS
from engine.batch_files.job_watcher import Between, noop
from engine.batch_files.rows import (
    DelimitedRows,
    JsonLines,
    Row,
    RowSource,
    SeenColumns,
    TextLines,
    WholeText,
    unique_names,
)
from engine.batch_files.tables import ParquetRows, SpreadsheetRows
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line, quoted
from engine.common.untrusted import open_untrusted, reason


class DocumentText(RowSource):
    """The whole file is one row with the columns `file`, `pages` and `text`; if unreadable, the row has a problem."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._row: Row | None = None
        self.columns = ("file", "pages", "text") if path.suffix.lower() == ".pdf" else ("file", "text")

    def rows(self) -> Iterator[Row]:
        if self._row is None:  # a long book takes a while
            read = DOCUMENTS.read(self.path)
            fields = {"file": self.path.name, "pages": read.pages, "text": read.text}
            self._row = Row(0, {name: fields[name] for name in self.columns}, read.problem, 1.0)
        yield self._row


class FolderRows(RowSource):
    """Rows of several files, each with a first column `file`; a column that a file itself calls so has another name."""

    def __init__(self, path: Path, files: Sequence[Path], open_file: Callable[[Path], RowSource]) -> None:
        super().__init__(path)
        self.files = tuple(files)
        self._open = open_file
        columns: dict[str, None] = {}
        for file in self.files:
            try:
                source = open_file(file)
            except EngineError:  # reported in its row
                continue
            columns |= dict.fromkeys(_own(source))
            self.remark = self.remark or source.remark
        unique = unique_names(["file", *columns])
        self._called = unique[1 + list(columns).index("file")] if "file" in columns else "file_2"
        if "file" in columns:
            told = f"The column 'file' of files in {plain_line(path.name)} is called {quoted(self._called)}."
            self.remark = f"{told} {self.remark}".strip()
        self.columns = unique
        self._seen = SeenColumns(unique)

    def all_columns(self) -> tuple[str, ...]:
        return self._seen.all_of(self.rows())

    def rows(self) -> Iterator[Row]:
        return self._seen.through(self._rows())

    def _rows(self) -> Iterator[Row]:
        index = 0
        for place, file in enumerate(self.files):
            name = file.relative_to(self.path).as_posix()
            try:
                source = self._open(file)
                for row in source.rows():
                    share = (place + row.share) / len(self.files)
                    yield Row(index, self._with_file(name, source, row), row.problem, share)
                    index += 1
            except EngineError as error:
                yield Row(index, {"file": name}, f"cannot be read: {error.message}", (place + 1) / len(self.files))
                index += 1
            except OSError as error:
                yield Row(index, {"file": name}, f"cannot be read ({reason(error)})", (place + 1) / len(self.files))
                index += 1

    def _with_file(self, name: str, source: RowSource, row: Row) -> dict[str, Any]:
        fields = dict(row.fields)
        if "file" in fields and not isinstance(source, _NAMED):
            called, number = self._called, 2
            while called in fields:  # only in rows that come after those that told the columns
                number += 1
                called = f"{self._called}_{number}"
            fields = {called if column == "file" else column: value for column, value in fields.items()}
        return {**fields, "file": name}


_NAMED = (DocumentText, WholeText)
"""Their column `file` is the one that a folder adds."""


def _own(source: RowSource) -> Iterator[str]:
    """The columns of a file within a folder."""
    return (name for name in source.columns if name != "file" or not isinstance(source, _NAMED))


@dataclass(frozen=True, slots=True)
class InputForm:
    """How to read an input, in addition to its file extension.

    Attributes:
        encoding: of text files; None: by byte order mark, otherwise UTF-8.
        whole_files: a text file is a single row instead of one row per line; None: those in a folder are.
        separator: of csv; None: guessed from the header.
        sheet: of a workbook, by its name; None: the first one that has rows.
    """

    encoding: str | None = None
    whole_files: bool | None = None
    separator: str | None = None
    sheet: str | None = None


_Opener = Callable[[Path, InputForm], RowSource]

_READERS: dict[str, _Opener] = {
    ".txt": lambda path, form: (WholeText if form.whole_files else TextLines)(path, encoding=form.encoding),
    ".md": lambda path, form: WholeText(path, encoding=form.encoding),
    ".csv": lambda path, form: DelimitedRows(path, separator=form.separator, encoding=form.encoding),
    ".tsv": lambda path, form: DelimitedRows(path, separator=form.separator or "\t", encoding=form.encoding),
    ".jsonl": lambda path, form: JsonLines(path, encoding=form.encoding),
    ".ndjson": lambda path, form: JsonLines(path, encoding=form.encoding),
    ".parquet": lambda path, _form: ParquetRows(path),
    ".xlsx": lambda path, form: SpreadsheetRows(path, form.sheet),
    ".pdf": lambda path, _form: DocumentText(path),
    ".docx": lambda path, _form: DocumentText(path),
    ".html": lambda path, _form: DocumentText(path),
    ".htm": lambda path, _form: DocumentText(path),
}
INPUT_SUFFIXES = tuple(_READERS)
_USUAL = "txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx or html"


def open_source(path: Path, form: InputForm | None = None) -> RowSource:
    """The rows of a file, or of all supported files of a folder."""
    form = form or InputForm()
    try:
        source = _folder(path, form) if path.is_dir() else _file(path, form)
        first = next(source.rows(), None)
        if first is None:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} has no rows: there is nothing to answer.")
        if first.problem and isinstance(source, DocumentText | WholeText):  # the only row
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} {first.problem}.")
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} cannot be read ({error.strerror or error}): check the path."
        ) from None
    return source


def rows_of(path: Path) -> RowSource:
    """The rows of a file, which may have none."""
    return _file(path, InputForm())


def _file(path: Path, form: InputForm) -> RowSource:
    reader = _READERS.get(path.suffix.lower())
    if reader is None and path.exists():
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} has an unsupported file type: use {_USUAL}, or a folder of such files.",
        )
    if reader is None or not path.exists():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no file {path}: check the path.")
    if not path.is_file():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} is a pipe or a device: save its content to a file.")
    return reader(path, form)


def _folder(path: Path, form: InputForm) -> RowSource:
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in _READERS
        and file.is_file()
        and not any(part.startswith((".", "~$")) for part in file.relative_to(path).parts)
    )
    if not files:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"The folder {path} has no supported files: put {_USUAL} files into it."
        )
    if form.whole_files is None:
        form = replace(form, whole_files=True)
    return FolderRows(path, files, lambda file: _file(file, form))


_BLOCK = 4 * 2**20


def files_of(source: RowSource) -> tuple[Path, ...]:
    return source.files if isinstance(source, FolderRows) else (source.path,)


def stamp(source: RowSource) -> tuple[tuple[str, int, int], ...]:
    """Cheap signs of a change: size and modification time of every file; (-1, -1) for a missing one."""
    signs = []
    for path in files_of(source):
        try:
            status = path.stat()
            signs.append((str(path), status.st_size, status.st_mtime_ns))
        except OSError:
            signs.append((str(path), -1, -1))
    return tuple(signs)


def file_digest(path: Path) -> str:
    return _digest(path, lambda _bytes: None)


def content_hash(source: RowSource, between: Between = noop) -> str:
    """A hash of all content and of the file names in a folder; reads everything once."""
    whole = hashlib.sha256()
    total = max(1, sum(size for _name, size, _time in stamp(source)))
    done = 0

    def tell(read: int) -> None:
        nonlocal done
        done += read
        between(min(1.0, done / total))

    for path in files_of(source):
        try:
            digest = _digest(path, tell)
        except OSError as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{path} cannot be read ({reason(error)}): check that it still exists."
            ) from None
        # The input may move between two runs, but names within a folder must not change.
        name = path.relative_to(source.path).as_posix() if path != source.path else ""
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()


def _digest(path: Path, on_read: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_128()
    with open_untrusted(path, buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()


_COUNTED_BYTES = 100 * 10**6
_UNPACKED = (".csv", ".jsonl", ".md", ".tsv", ".txt")
_ROWS_AT_ONCE = 64
_TOLD_BY = 200


def counted_rows(source: RowSource, between: Between = noop) -> int | None:
    """The number of rows; None if the input is too big to count quickly."""
    if sum(size for _name, size, _time in stamp(source)) > _COUNTED_BYTES:
        return None
    count = 0
    for count, row in enumerate(source.rows(), start=1):
        if count % _ROWS_AT_ONCE == 1:
            between(row.share)
    return count


def has_rows(source: RowSource, rows: int) -> bool:
    """Whether there are at least `rows` rows; False if the input is too big to count quickly."""
    nbytes = sum(size for _name, size, _time in stamp(source))
    # A line takes at least one byte, unless compressed.
    if nbytes > _COUNTED_BYTES or (nbytes < rows and source.path.suffix.lower() in _UNPACKED):
        return False
    return next(islice(source.rows(), rows - 1, None), None) is not None


class RowCount:
    """The number of rows, as far as known.

    Args:
        counted: see `counted_rows`.
    """

    def __init__(self, counted: int | None) -> None:
        self._total = counted
        self._exact = counted is not None

    @property
    def total(self) -> int | None:
        return self._total

    def read(self, rows: int, share: float) -> None:
        if not self._exact and share > 0 and rows >= _TOLD_BY:
            self._total = max(rows, round(rows / share))

    def ended(self, rows: int) -> None:
        """Notes the total at the end of the input."""
        self._total, self._exact = rows, True
