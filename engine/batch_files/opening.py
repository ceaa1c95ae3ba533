"""Opens an input file or folder by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.batch_files.delimited import DelimitedRows
from engine.batch_files.folder import FolderRows
from engine.batch_files.json_lines import JsonLines
from engine.batch_files.parquet import ParquetRows
from engine.batch_files.pdf import PdfText
from engine.batch_files.row import RowSource
from engine.batch_files.spreadsheet import SpreadsheetRows
from engine.batch_files.text_lines import TextLines, WholeText
from engine.common.errors import EngineError, ErrorCode


@dataclass(frozen=True, slots=True)
class InputForm:
    """How to read an input, in addition to its file extension.

    Attributes:
        encoding: of text files; None: by byte order mark, otherwise UTF-8.
        whole_files: a text file is a single row instead of one row per line.
        separator: of csv; None: guessed from the header.
    """

    encoding: str | None = None
    whole_files: bool = False
    separator: str | None = None


_Opener = Callable[[Path, InputForm], RowSource]

_READERS: dict[str, _Opener] = {
    ".txt": lambda path, form: (WholeText if form.whole_files else TextLines)(path, encoding=form.encoding),
    ".md": lambda path, form: WholeText(path, encoding=form.encoding),
    ".csv": lambda path, form: DelimitedRows(path, separator=form.separator, encoding=form.encoding),
    ".tsv": lambda path, form: DelimitedRows(path, separator=form.separator or "\t", encoding=form.encoding),
    ".jsonl": lambda path, form: JsonLines(path, encoding=form.encoding),
    ".ndjson": lambda path, form: JsonLines(path, encoding=form.encoding),
    ".parquet": lambda path, _form: ParquetRows(path),
    ".xlsx": lambda path, _form: SpreadsheetRows(path),
    ".pdf": lambda path, _form: PdfText(path),
}
INPUT_SUFFIXES = tuple(_READERS)
_USUAL = "txt, md, csv, tsv, jsonl, parquet, xlsx or pdf"


def open_source(path: Path, form: InputForm | None = None) -> RowSource:
    """The rows of a file, or of all supported files of a folder.

    Raises:
        EngineError: `INVALID_REQUEST`: it does not exist, has no rows, or is not supported.
    """
    form = form or InputForm()
    try:
        source = _folder(path, form) if path.is_dir() else _file(path, form)
        first = next(source.rows(), None)
        if first is None:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} has no rows: there is nothing to answer.")
        if first.problem and isinstance(source, PdfText | WholeText):  # the only row
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} {first.problem}.")
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} cannot be read ({error.strerror or error}): check the path."
        ) from None
    return source


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
        if file.suffix.lower() in _READERS and file.is_file() and not file.name.startswith((".", "~$"))
    )
    if not files:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"The folder {path} has no supported files: put {_USUAL} files into it."
        )
    return FolderRows(path, files, lambda file: _file(file, form))
