"""Inputs as people have them: read as they are meant, or refused in one sentence that says what to do."""

import datetime
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.batch_files.opening import open_source
from engine.batch_files.prepared_job import prepare
from engine.batch_files.prompts import template_of
from engine.batch_files.result_file import write_result
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import BatchJob
from engine.common.errors import EngineError


def _rows(path: Path) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in open_source(path).rows()]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_recognised(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "input.csv"
    path.write_bytes("text,näme\nhi,1\nyo,Ω\n".encode(encoding))
    assert _rows(path) == [{"text": "hi", "näme": "1"}, {"text": "yo", "näme": "Ω"}]


def test_a_csv_of_one_column_has_no_separator(tmp_path: Path) -> None:
    path = tmp_path / "input.csv"
    path.write_text('text\nhello; there, you\n"quoted ""so"", too\nand on"\n')
    assert [row["text"] for row in _rows(path)] == ["hello; there, you", 'quoted "so", too\nand on']


def test_half_surrogate_pairs_in_json_spoil_no_result(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text('{"text": "a\\ud800b", "deep": ["\\uD83D\\uDE00", {"\\udfff": 1}]}\n')
    (row,) = _rows(path)
    assert row == {"text": "a\ufffdb", "deep": ["😀", {"\ufffd": 1}]}
    for suffix in (".jsonl", ".csv", ".parquet", ".xlsx"):
        assert write_result(tmp_path / f"out{suffix}", open_source(path), [Answer(0, "x", "stop")]).rows == 1


def test_json_of_another_shape_is_refused_with_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text('[{"text": "a"}]\n')
    with pytest.raises(EngineError, match="a list"):
        open_source(path)


def test_a_folder_of_different_files_asks_what_each_row_has(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "two"}\n{"prompt": ""}\n')
    source = open_source(tmp_path)
    template = template_of(source.columns)
    rows = list(source.rows())
    assert [template.fill(row) for row in rows[:2]] == ["one\n", "two"]
    with pytest.raises(ValueError, match="nothing in 'prompt'"):
        template.fill(rows[2])


@pytest.mark.skipif(os.name == "nt", reason="there are no such links and pipes")
def test_links_that_loop_and_pipes_hang_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    for name, target in (("up", ".."), ("self", "."), ("gone.txt", "nowhere.txt"), ("loop.txt", "loop.txt")):
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.txt")
    assert [row["text"] for row in _rows(folder)] == ["one\n"]
    with pytest.raises(EngineError, match="pipe"):
        open_source(folder / "pipe.txt")
    with pytest.raises(EngineError, match="no file"):
        open_source(folder / "loop.txt")


def _sheet(path: Path, damage: slice) -> None:
    """A workbook whose sheet is cut short somewhere."""
    book = openpyxl.Workbook()
    book.active.append(["text"])
    for row in range(20_000):
        book.active.append([f"row {row}"])
    whole = path.with_name("whole.xlsx")
    book.save(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, content[damage] if "sheet1" in entry.filename else content)
    whole.unlink()


def test_a_sheet_that_is_cut_short_gives_what_it_has_and_says_where_it_ends(tmp_path: Path) -> None:
    _sheet(tmp_path / "input.xlsx", slice(0, 700_000))
    *good, last = open_source(tmp_path / "input.xlsx").rows()
    assert len(good) > 1000
    assert [row.fields["text"] for row in good[:2]] == ["row 0", "row 1"]
    assert not any(row.problem for row in good)
    assert "cannot be read" in last.problem


_DEEP = pa.struct([("when", pa.timestamp("ns")), ("more", pa.list_(pa.map_(pa.string(), pa.duration("ns"))))])


def _table() -> pa.Table:
    moments = [1, 1_700_000_000_123_456_789, None]
    deep = [{"when": 1, "more": [[("k", 5)]]}, None, {"when": None, "more": []}]
    return pa.table(
        {
            "text": ["a", "b", "c"],
            "at": pa.array(moments, pa.timestamp("ns", "UTC")),
            "deep": pa.array(deep, _DEEP),
            "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
            "raw": pa.array([b"\x00\xff", None, b""], pa.binary()),
            "price": pa.array([1, 2, 3], pa.decimal128(9, 2)),
        }
    )


def test_parquet_goes_through_unchanged_to_the_nanosecond(tmp_path: Path) -> None:
    pq.write_table(_table(), tmp_path / "in.parquet", row_group_size=2)
    source = open_source(tmp_path / "in.parquet")
    assert [row.fields["text"] for row in source.rows()] == ["a", "b", "c"]
    answers = [Answer(0, "x", "stop", 1, 2), Answer(2, "z", "length", 3, 4)]
    assert write_result(tmp_path / "out.parquet", source, answers).rows == 2
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.select(_table().column_names).equals(_table().take([0, 2]))
    assert written.column("answer").to_pylist() == ["x", "z"]
    for suffix in (".jsonl", ".csv", ".xlsx"):
        write_result(tmp_path / f"out{suffix}", source, answers)
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert first["at"] == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC).isoformat()


def test_a_sheet_says_what_it_cut_and_loses_no_digits(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    rows = [
        {"text": "long", "account": 12345678901234567, "flag": True, "share": float("nan")},
        {"text": "x" * 40_000, "account": 7, "flag": False, "share": 0.5},
        {"text": "fits"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [Answer(0, "\U0001f600" * 30_000, "stop"), Answer(1, "=cmd()", "stop"), Answer(2, "y" * 32_767, "stop")]
    write_result(tmp_path / "out.xlsx", open_source(path), answers)
    (_, first, second, third) = openpyxl.load_workbook(tmp_path / "out.xlsx").active.values
    assert first[:4] == ("long", "12345678901234567", True, "nan")
    assert len(first[4].encode("utf-16-le")) <= 2 * 32_767
    assert "32,767" in first[8]
    assert "32,767" in second[8]
    assert (third[4], third[8]) == ("y" * 32_767, None)


def test_json_lines_have_no_words_that_json_lacks_and_late_columns_make_way(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    rows: list[dict[str, Any]] = [{"text": "a", "share": float("inf")}] * 201
    rows.append({"text": "b", "answer": "mine"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_result(tmp_path / "out.jsonl", open_source(path), [Answer(0, "x", "stop"), Answer(201, "y", "stop")])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    first, last = [json.loads(line, parse_constant=refuse) for line in lines]
    assert first["share"] is None
    assert (last["answer"], last["answer_input"]) == ("y", "mine")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".xlsx", ".jsonl"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_columns_that_only_late_rows_have_are_kept(tmp_path: Path, suffix: str, is_folder: bool) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "input.jsonl"
    rows: list[dict[str, Any]] = [{"text": "a"}] * 300
    rows.append({"text": "b", "late": 7, "answer": "mine", "answer_input": "also mine"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(path.parent if is_folder else path)
    write_result(tmp_path / f"out{suffix}", source, [Answer(0, "x", "stop"), Answer(300, "y", "stop")])
    first, last = [dict(row.fields) for row in open_source(tmp_path / f"out{suffix}").rows()]
    assert (last["text"], str(last["late"]), last["answer"]) == ("b", "7", "y")
    assert {last["answer_input"], last["answer_input_2"]} == {"mine", "also mine"}
    assert first["answer"] == "x"
    assert not first.get("late")


def test_a_template_may_name_a_column_that_only_late_rows_have(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_text('{"text": "a"}\n' * 300 + '{"text": "b", "late": 7}\n')
    job = BatchJob(str(path), str(tmp_path / "out.csv"), template="{{late}}")
    asked = [one for _share, one in prepare(job).asked()]
    assert isinstance(asked[300], RowRequest)
    with pytest.raises(EngineError, match="text, late"):
        prepare(BatchJob(str(path), str(tmp_path / "out.csv"), template="{{later}}"))
