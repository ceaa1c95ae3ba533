"""Every kind of input gives its rows, and what is wrong with it is said in one sentence."""

import contextlib
import csv
import json
import random
import re
import zipfile
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch_files.openai_format import holds_openai_requests
from engine.batch_files.opening import InputForm, open_source
from engine.batch_files.prepared_job import prepare
from engine.batch_files.result_file import write_result
from engine.batch_files.rows import Answer
from engine.common.config import BatchJob
from engine.common.errors import EngineError, ErrorCode
from tests.made_documents import pdf
from tests.refusals import refused

_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=30)


def _fields(path: Path, form: InputForm | None = None) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in open_source(path, form).rows()]


def _problems(path: Path, form: InputForm | None = None) -> list[str]:
    return [row.problem for row in open_source(path, form).rows()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=8), st.sampled_from(",;\t|"))
def test_csv_with_quotes_separators_and_newlines_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], separator: str
) -> None:
    path = tmp_path_factory.mktemp("csv") / "input.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(["first", "second"])
        writer.writerows(rows)
    assert _fields(path) == [{"first": a, "second": b} for a, b in rows]
    assert not any(_problems(path))


_NAME = st.text(st.sampled_from('ab1,;|"\n\r\t\u00e4 '), min_size=1, max_size=6)
_CELL = st.text(st.sampled_from("xy,;|\"\n\r\t\u4e2d \\_'=-"), max_size=8)


@st.composite
def _tables(draw: st.DrawFn, cell: st.SearchStrategy[str] = _CELL) -> tuple[list[str], list[list[str]]]:
    """Names, among them equal ones, and rows that have something in each of them."""
    names = draw(st.lists(_NAME.filter(str.strip), min_size=2, max_size=5))
    size = {"min_size": len(names), "max_size": len(names)}
    return names, draw(st.lists(st.lists(cell, **size).filter(any), min_size=1, max_size=5))


def _assert_whole(path: Path, names: list[str], rows: list[list[Any]]) -> None:
    """No column and no row is lost, in order; names are kept, and the first of several equal ones is."""
    source = open_source(path)
    columns = source.columns
    assert len(set(columns)) == len(columns) == len(names)
    assert [columns[names.index(name)] for name in dict.fromkeys(names)] == list(dict.fromkeys(names))
    assert bool(source.remark) == (len(set(names)) < len(names))
    assert not any(row.problem for row in source.rows())
    assert [[row.fields[name] for name in columns] for row in source.rows()] == rows
    output = path.with_name("out.jsonl")
    write_result(output, source, [Answer(number, "x", "stop") for number in range(len(rows))])
    written = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [list(line.values())[: len(names)] for line in written] == rows
    assert all(line["answer"] == "x" for line in written)


@settings(max_examples=40, deadline=None)
@given(_tables(), st.sampled_from(",;\t|"), st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]), st.booleans())
def test_no_row_and_no_column_of_a_csv_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
    table: tuple[list[str], list[list[str]]],
    separator: str,
    quoting: Any,
    hint: bool,
) -> None:
    names, rows = table
    path = tmp_path_factory.mktemp("csv") / "input.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(f"sep={separator}\r\n" if hint else "")
        csv.writer(file, delimiter=separator, quoting=quoting).writerows([names, *rows])
    _assert_whole(path, [name.strip() for name in names], rows)


def _sheet_with(path: Path, names: list[str], rows: list[list[str]], dimension: str) -> None:
    """A workbook that says of its sheet that it is as big as `dimension`, as some programs do."""
    book = openpyxl.Workbook()
    for line in (names, *rows):
        book.active.append([_escaped(value) for value in line])
    plain = path.with_name("plain.xlsx")
    book.save(plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.namelist():
            content = old.read(entry)
            if "sheet1" in entry:
                content = re.sub(rb'<dimension ref="[^"]*" ?/>', dimension.encode(), content)
            new.writestr(entry, content)


def _escaped(value: str) -> str | None:
    """As spreadsheet programs write text."""
    return re.sub("_(?=x[0-9A-Fa-f]{4}_)", "_x005F_", value).replace("\r", "_x000D_") or None


@settings(max_examples=20, deadline=None)
@given(
    _tables(st.sampled_from(["a", "b\r\nc", "_x000D_", "_x005F_", "_x005f_x000d_", "x000D_", "\U0001f600 ", "\u4e2d"])),
    st.sampled_from(["", "A1", "A1:A1", "A1:B2", "B2:C3", "A1:XFD1048576", "A9:B9"]),
)
def test_a_sheet_is_read_as_it_is_whatever_it_says_of_its_size(
    tmp_path_factory: pytest.TempPathFactory, table: tuple[list[str], list[list[str]]], dimension: str
) -> None:
    names, rows = table
    path = tmp_path_factory.mktemp("xlsx") / "input.xlsx"
    _sheet_with(path, names, rows, dimension and f'<dimension ref="{dimension}"/>')
    _assert_whole(path, [name.strip() for name in names], rows)
    again = path.with_name("out.xlsx")
    write_result(again, open_source(path), [Answer(number, "x", "stop") for number in range(len(rows))])
    assert [list(row.values())[: len(names)] for row in _fields(again)] == rows


@settings(max_examples=15, deadline=None)
@given(_tables())
def test_no_row_and_no_column_of_a_parquet_file_is_lost(
    tmp_path_factory: pytest.TempPathFactory, table: tuple[list[str], list[list[str]]]
) -> None:
    names, rows = table
    path = tmp_path_factory.mktemp("parquet") / "input.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(column) for column in zip(*rows, strict=True)], names=names), path)
    _assert_whole(path, names, rows)
    again = path.with_name("out.parquet")
    write_result(again, open_source(path), [Answer(number, "x", "stop") for number in range(len(rows))])
    _assert_whole_parquet(again, rows)


def _assert_whole_parquet(path: Path, rows: list[list[str]]) -> None:
    table = pq.read_table(path)
    assert [list(row.values())[: len(rows[0])] for row in table.to_pylist()] == rows


@settings(max_examples=30, deadline=None)
@given(_tables())
def test_equal_names_in_a_line_of_json_are_told_apart(
    tmp_path_factory: pytest.TempPathFactory, table: tuple[list[str], list[list[str]]]
) -> None:
    names, rows = table
    path = tmp_path_factory.mktemp("jsonl") / "input.jsonl"
    lines = (
        ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in zip(names, row, strict=True))
        for row in rows
    )
    path.write_text("".join(f"{{{line}}}\n" for line in lines))
    assert [list(row.values()) for row in _fields(path)] == rows
    assert len({tuple(row) for row in _fields(path)}) == 1


@pytest.mark.parametrize(
    ("content", "columns", "rows"),
    [
        ('size 5",price\n1,2\n', ['size 5"', "price"], [["1", "2"]]),
        ('height (5")\n7", tall\n"ok"\n', ['height (5")'], [['7", tall'], ["ok"]]),
        ("Really, why?\nfirst\nsecond\n", ["Really, why?"], [["first"], ["second"]]),
        ('"1",";\r",";1"\n"","",";"\n', ["1", ";", ";1"], [["", "", ";"]]),
    ],
)
def test_quotes_and_separators_within_names_separate_nothing(
    tmp_path: Path, content: str, columns: list[str], rows: list[list[str]]
) -> None:
    path = tmp_path / "input.csv"
    path.write_text(content, newline="")
    assert list(open_source(path).columns) == columns
    assert [list(row.values()) for row in _fields(path)] == rows


def test_a_hidden_folder_is_not_read_and_an_empty_text_is_marked(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.txt").write_text("not meant")
    (tmp_path / "a.txt").write_text(" \n")
    (tmp_path / "b.txt").write_text("b")
    assert [row["file"] for row in _fields(tmp_path)] == ["a.txt", "b.txt"]
    assert _problems(tmp_path) == ["contains no text", ""]


def test_rows_of_a_folder_keep_their_own_column_of_that_name(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_text("file,text,file_2\nreport.pdf,hello,kept\n")
    (folder / "b.jsonl").write_text('{"text": "x"}\n' * 201 + '{"file": "late.pdf", "text": "y"}\n')
    (folder / "c.txt").write_text("whole\ntext\n")
    source = open_source(folder)
    assert source.columns == ("file", "file_3", "text", "file_2")
    assert "'file_3'" in source.remark
    rows = [dict(row.fields) for row in source.rows()]
    assert rows[0] == {"file": "a.csv", "file_3": "report.pdf", "text": "hello", "file_2": "kept"}
    assert rows[202] == {"file": "b.jsonl", "file_3": "late.pdf", "text": "y"}
    assert rows[203:] == [{"file": "c.txt", "text": "whole\ntext\n"}]
    lines = open_source(folder, InputForm(whole_files=False)).rows()
    assert [row.fields["text"] for row in lines][203:] == ["whole", "text"]


@pytest.mark.parametrize(
    ("name", "content", "is_openai"),
    [
        ("a.csv", "custom_id,body\n1,Hello\n", False),
        ("b.jsonl", '{"custom_id": "1", "body": "Hello"}\n', False),
        ("c.jsonl", '{"custom_id": "1", "body": {"title": "Hello"}}\n', False),
        ("d.jsonl", '{"custom_id": "1", "body": 3}\n{"custom_id": "2", "body": {"messages": []}}\n', True),
    ],
)
def test_a_file_with_these_columns_is_no_openai_batch_for_that(
    tmp_path: Path, name: str, content: str, is_openai: bool
) -> None:
    (tmp_path / name).write_text(content)
    assert holds_openai_requests(open_source(tmp_path / name)) == is_openai


@pytest.mark.parametrize("separator", ["", "ab", '"', "\n"])
def test_what_cannot_separate_is_refused(tmp_path: Path, separator: str) -> None:
    (tmp_path / "input.csv").write_text("a,b\n1,2\n")
    with refused(ErrorCode.INVALID_REQUEST, "one character"):
        open_source(tmp_path / "input.csv", InputForm(separator=separator))


_OBEYED = ("=cmd|' /C calc'!A0", "+1+cmd()", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "- one\n- two")


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_what_a_model_says_is_text_for_spreadsheets_and_terminals(tmp_path: Path, suffix: str) -> None:
    path, output = tmp_path / "input.csv", tmp_path / f"out{suffix}"
    said = [*_OBEYED, "\x1b]0;title\x07 \x9b31m", "-12.5", "+3", "-1,000.5e3%", "plain = text", "a\r\nb"]
    path.write_text("text\n" + "=own\n" * len(said))
    answers = [Answer(number, text, "stop", reasoning=text) for number, text in enumerate(said)]
    write_result(output, open_source(path), answers, extras=["reasoning"])
    found = _fields(output)
    quoted, plain = found[: len(_OBEYED)], found[len(_OBEYED) :]
    assert all(row["answer"][0] == row["reasoning"][0] == "'" for row in quoted)
    assert [row["answer"] for row in plain[1:]] == ["-12.5", "+3", "-1,000.5e3%", "plain = text", "a\nb"]
    assert all(row["text"] == "=own" for row in found)
    assert not set(output.read_text(encoding="utf-8")) & set("\x1b\x07\x9b")
    raw = tmp_path / f"raw{suffix}"
    write_result(raw, open_source(path), answers, raw_text=True)
    assert [row["answer"] for row in _fields(raw)] == said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_names_the_encoding(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "input.csv"
    path.write_text("näme\nwért\n", encoding=encoding)
    assert _fields(path) == [{"näme": "wért"}]


def test_a_row_in_another_encoding_is_marked_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "input.csv"
    path.write_bytes(b"text\nfine\nW\xf6rter\nfine too\n")
    problems = _problems(path)
    assert [bool(problem) for problem in problems] == [False, True, False]
    assert "--encoding" in problems[1]
    assert [row["text"] for row in _fields(path, InputForm(encoding="cp1252"))] == ["fine", "Wörter", "fine too"]


def test_a_csv_row_with_too_many_fields_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "input.csv"
    path.write_text("a,b\n1,2\n1,2,3\n4\n")
    assert [bool(problem) for problem in _problems(path)] == [False, True, False]
    assert _fields(path)[2] == {"a": "4"}


def test_a_quote_that_is_never_closed_ends_in_a_marked_row(tmp_path: Path) -> None:
    path = tmp_path / "input.csv"
    path.write_text('text\nfine\n"open ' + "x" * (5 * 2**20))
    assert [bool(problem) for problem in _problems(path)] == [False, True]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text('{"a": {"b": [1]}}\n\n"plain"\n[1]\n{broken\n', encoding="utf-8")
    source = open_source(path)
    assert source.columns == ("a", "text")
    assert _fields(path)[:2] == [{"a": {"b": [1]}}, {"text": "plain"}]
    assert [bool(problem) for problem in _problems(path)] == [False, False, True, True]


def test_text_a_row_a_line_or_a_row_a_file(tmp_path: Path) -> None:
    path = tmp_path / "input.txt"
    path.write_text("one\r\n\r\n two\nthree", newline="")
    assert [row["text"] for row in _fields(path)] == ["one", " two", "three"]
    assert _fields(path, InputForm(whole_files=True)) == [{"file": "input.txt", "text": "one\n\n two\nthree"}]


def test_values_that_python_has_nothing_like_are_read_and_written_unchanged(tmp_path: Path) -> None:
    path, output = tmp_path / "input.parquet", tmp_path / "out.parquet"
    twice = pa.StructArray.from_arrays([pa.array([1, 3]), pa.array([2, 4])], names=["x", "x"])
    bad = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"\xff\xfeo"))
    columns = {
        "bad": bad,
        "zone": pa.array([1, None], pa.timestamp("ns", "Foo/Bar")),
        "late": pa.array([2**31 - 1, 0], pa.date32()),
        "keys": pa.array([[(1, [2])], None], pa.map_(pa.timestamp("ns"), pa.list_(pa.duration("ns")))),
        "inner": pa.array([{"t": [5]}, None], pa.struct([("t", pa.list_(pa.time64("ns")))])),
        "view": pa.array(["x", "y"], pa.string_view()),
    }
    pq.write_table(pa.Table.from_arrays([twice, *columns.values()], names=["twice", *columns]), path)
    first, second = _fields(path)
    assert first["twice"] == {"x": 1, "x_2": 2}
    assert first["bad"] == "\ufffd\ufffd"
    assert second["bad"] == "o"
    assert isinstance(first["late"], str)
    assert second["late"] == date(1970, 1, 1)
    assert first["keys"] == [(datetime(1970, 1, 1), [timedelta(0)])]
    assert first["inner"] == {"t": [time(0)]}
    assert second["zone"] is second["keys"] is second["inner"] is None
    write_result(output, open_source(path), [Answer(1, "x", "stop")])
    table = pq.read_table(output)
    assert table["view"].to_pylist() == ["y"]
    assert table["late"].type == pa.date32()
    for suffix in (".csv", ".jsonl", ".xlsx"):
        write_result(output.with_suffix(suffix), open_source(path), [Answer(0, "x", "stop"), Answer(1, "y", "stop")])
        assert [row["answer"] for row in _fields(output.with_suffix(suffix))] == ["x", "y"]


def test_a_workbook_gives_the_first_sheet_that_is_shown_and_tells_of_others(tmp_path: Path) -> None:
    path = tmp_path / "input.xlsx"
    book = openpyxl.Workbook()
    book.active.append(["secret"])
    book.active.sheet_state = "hidden"
    book.create_chartsheet("Chart", 0)
    for name, text in (("Data", "x"), ("More", "y"), ("Empty", None)):
        for line in ([text and "text"], [text]):
            book.create_sheet(name).append(line) if name not in book.sheetnames else book[name].append(line)
    book.active = 2
    book.save(path)
    assert _fields(path) == [{"text": "x"}]
    assert open_source(path).remark == "Other sheets of input.xlsx were not read: 'More'."
    more = open_source(path, InputForm(sheet="More"))
    assert [row.fields for row in more.rows()] == [{"text": "y"}]
    assert more.remark == "Other sheets of input.xlsx were not read: 'Data'."
    for missing in ("Empty", "Sheet", "Chart", "data"):
        with pytest.raises(EngineError, match=r"has no sheet .* with rows: choose 'Data' or 'More'"):
            open_source(path, InputForm(sheet=missing))
    forms = set()
    for sheet in (None, "Data", "More"):
        job = BatchJob(str(path), str(tmp_path / "output.csv"), template="{{text}}", sheet=sheet)
        forms.add(prepare(job).manifest("model", "int8").form)
    assert len(forms) == 3  # another sheet is another job


def test_a_formula_without_its_result_is_no_empty_cell(tmp_path: Path) -> None:
    path = tmp_path / "input.xlsx"
    book = openpyxl.Workbook()
    for line in (["text", "=A1"], ["x", "=1+1"], ["y", 2]):
        book.active.append(line)
    book.save(path)
    assert _fields(path) == [{"text": "x", "column_2": None}, {"text": "y", "column_2": 2}]
    first, second = _problems(path)
    assert "formula" in first
    assert not second


def test_a_folder_gives_the_rows_of_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.csv").write_text("text\nfrom csv\n")
    (tmp_path / "b.pdf").write_bytes(pdf(["from pdf"]))
    (tmp_path / "c.xlsx").write_bytes(b"no sheet")
    (tmp_path / "deep" / "d.md").write_text("# from md")
    (tmp_path / "e.exe").write_bytes(b"no text")
    source = open_source(tmp_path)
    rows = list(source.rows())
    assert [row.fields["file"] for row in rows] == ["a.csv", "b.pdf", "c.xlsx", "deep/d.md"]
    assert [row.fields.get("text") for row in rows] == ["from csv", "from pdf", None, "# from md"]
    assert [bool(row.problem) for row in rows] == [False, False, True, False]
    assert [row.index for row in rows] == [0, 1, 2, 3]


def test_a_pdf_with_a_password_is_refused_alone_and_marked_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "input.pdf").write_bytes(pdf(["hidden"], password="secret"))
    with pytest.raises(EngineError, match=r"input\.pdf .*password"):
        open_source(tmp_path / "input.pdf")
    assert "password" in _problems(tmp_path)[0]


def _bomb(path: Path) -> None:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("xl/worksheets/sheet1.xml", "w") as sheet,
    ):
        for _ in range(100):
            sheet.write(b"<row/>" * 200_000)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("input.csv", b"", "column names"),
        ("input.csv", b"text\n", "no rows"),
        ("input.jsonl", b"\n\n", "no rows"),
        ("input.doc", b"x", "unsupported file type"),
        ("input.parquet", b"PAR1 no", "parquet"),
        ("input.xlsx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"x" * 600, "password"),
        ("input.xlsx", b"nothing", "xlsx"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes, word: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(EngineError) as refusal:
        open_source(path)
    assert refusal.value.code == ErrorCode.INVALID_REQUEST
    assert word in refusal.value.message
    assert str(path) in refusal.value.message


def test_a_sheet_that_would_burst_is_refused_unread(tmp_path: Path) -> None:
    _bomb(tmp_path / "input.xlsx")
    with pytest.raises(EngineError, match="unpacks to"):
        open_source(tmp_path / "input.xlsx")


def test_what_is_not_there_and_folders_without_files_are_refused(tmp_path: Path) -> None:
    with refused(ErrorCode.INVALID_REQUEST):
        open_source(tmp_path / "missing.csv")
    with refused(ErrorCode.INVALID_REQUEST, "folder"):
        open_source(tmp_path)


def test_any_bytes_give_rows_or_one_refusal(tmp_path: Path) -> None:
    chance = random.Random(5)
    for suffix in (".txt", ".csv", ".tsv", ".jsonl", ".md", ".parquet", ".xlsx", ".pdf"):
        for trial in range(15):
            path = tmp_path / f"{trial}{suffix}"
            path.write_bytes(chance.randbytes(chance.randrange(400)))
            rows = []
            with contextlib.suppress(EngineError):
                rows = list(open_source(path).rows())
            json.dumps([dict(row.fields) for row in rows])
            for row in rows:
                "".join(str(value) for value in row.fields.values()).encode("utf-8")
