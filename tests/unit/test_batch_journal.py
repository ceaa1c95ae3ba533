"""A row has one ending, whatever happens to the process, and results are written whole or not at all."""

import csv
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.batch_files.journal import JobManifest, Journal, discard, journal_path, known_jobs, read_answers, read_job
from engine.batch_files.openai_format import errors_path
from engine.batch_files.opening import content_hash, open_source, stamp
from engine.batch_files.result_file import Written, check_output, write_result
from engine.batch_files.rows import Answer, failed
from engine.common.errors import EngineError, ErrorCode
from tests.refusals import refused
from tests.unit.remembered import Remembered

_MANIFEST = JobManifest("hash", "{{text}}", "", "model", "bf16", "{}", "", "{}")


def _answer(row: int) -> Answer:
    return Answer(row, f"answer {row} \ud800", "stop", 3, row % 7)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    return tmp_path


def test_failed_rows_that_were_cut_off_still_get_their_tokens(home: Path) -> None:
    with closing(Journal(journal_path(home / "out.csv"), _MANIFEST)) as journal:
        journal.record([Answer(0, "{", "length", 3, 4, "is no JSON"), Answer(1, "", "stop", 3, 4, "is empty")])
        journal.redo_cut_off()
        assert journal.redo_failed() == 1
        assert (journal.tokens_again(0), journal.tokens_again(1)) == (8, None)


def test_answers_come_back_in_order_and_are_counted(home: Path) -> None:
    path = journal_path(home / "out.csv")
    assert path != journal_path(home / "other" / "out.csv")
    journal = Journal(path, _MANIFEST, '{"output": "out.csv"}')
    journal.record([_answer(5), failed(2, "is empty")])
    journal.record([_answer(0)])
    assert [answer.row for answer in journal.answers()] == [0, 2, 5]
    assert journal.counts() == (3, 1, 5, 0)
    assert journal.has(2)
    assert not journal.has(3)
    assert [answer.row for answer in read_answers(path, after=0)] == [2, 5]
    assert [answer.row for answer in read_answers(path, ended="failed")] == [2]
    (known,) = known_jobs()
    assert (known.done, known.failed, known.running, known.finished_s) == (3, 1, True, None)
    assert known.settings == {"output": "out.csv"}
    assert journal.redo_failed() == 1
    assert not journal.has(2)
    assert journal.counts() == (2, 0, 5, 0)
    journal.finish()
    journal.close()
    journal.close()
    (known,) = known_jobs()
    assert not known.running
    assert known.finished_s is not None
    again = Journal(path, _MANIFEST)
    assert [answer.row for answer in again.answers()] == [0, 2, 5]
    again.record([_answer(2)])
    assert again.has(2)
    assert again.counts() == (3, 0, 7, 0)
    with pytest.raises(EngineError):
        again.record([_answer(2)])
    again.close()
    discard(path)
    assert known_jobs() == []
    assert list(path.parent.iterdir()) == []


def test_a_job_from_before_there_was_reasoning_goes_on(home: Path) -> None:
    path = journal_path(home / "out.csv")
    Journal(path, _MANIFEST).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("ALTER TABLE answers DROP COLUMN reasoning")
        connection.execute("ALTER TABLE answers DROP COLUMN answered_by")
        connection.execute("ALTER TABLE answers DROP COLUMN tool_calls")
        connection.execute("INSERT INTO answers VALUES (0, 'old', 'stop', 1, 2, '')")
    assert [answer.text for answer in read_answers(path)] == ["old"]
    journal = Journal(path, _MANIFEST)
    assert not journal.has_reasoning
    new = Answer(1, "new", "stop", 1, 2, reasoning="why", by="rack", tool_calls="[]")
    journal.record([new])
    assert journal.has_reasoning
    assert list(journal.answers()) == [Answer(0, "old", "stop", 1, 2), new]
    assert read_answers(path) == list(journal.answers())
    journal.close()


def test_no_row_has_two_endings_and_a_refused_write_leaves_none_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job", _MANIFEST)
    journal.record([_answer(1)])
    with pytest.raises(EngineError):
        journal.record([_answer(2), _answer(1)])
    assert [answer.row for answer in journal.answers()] == [1]
    journal.close()


def test_a_second_run_of_the_same_job_is_refused_and_another_job_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.batch_files.journal._LOCK_S", 0.0)
    path = tmp_path / "job"
    journal = Journal(path, _MANIFEST)
    with refused(ErrorCode.BUSY):
        Journal(path, _MANIFEST)
    journal.record([_answer(0)])
    journal.close()
    with pytest.raises(EngineError, match="another template"):
        Journal(path, replace(_MANIFEST, template="other"))
    with pytest.raises(EngineError, match=r"bf16.*int8"):
        Journal(path, replace(_MANIFEST, precision="int8"))
    Journal(path, _MANIFEST).close()


def test_a_job_that_has_no_answers_yet_takes_what_is_now(tmp_path: Path) -> None:
    path = tmp_path / "job"
    Journal(path, _MANIFEST).close()
    journal = Journal(path, replace(_MANIFEST, precision="int8"))
    journal.record([_answer(0)])
    journal.close()
    known = read_job(path)
    assert known.precision == "int8"
    with pytest.raises(EngineError):
        Journal(path, _MANIFEST)


def test_a_damaged_journal_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(EngineError, match="damaged"):
        Journal(path, _MANIFEST)
    discard(path)
    assert list(tmp_path.iterdir()) == []
    assert read_job(path) is None


def test_a_full_disk_is_said_and_the_journal_goes_on_when_there_is_room(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job", _MANIFEST)
    connection: sqlite3.Connection = journal._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with refused(ErrorCode.DISK_FULL):
        journal.record([replace(_answer(row), text="x" * 2000) for row in range(100)])
    assert journal.counts() == (0, 0, 0, 0)
    connection.execute("PRAGMA max_page_count = 100000")
    journal.record([_answer(0)])
    assert journal.counts()[0] == 1
    journal.close()


_WRITER = """
import sys
from pathlib import Path
from engine.batch_files.rows import Answer
from engine.batch_files.journal import Journal
from engine.batch_files.journal import JobManifest
journal = Journal(Path(sys.argv[1]), JobManifest("hash", "{{text}}", "", "model", "bf16", "{}", "", "{}"))
print("open", flush=True)
rows = [row for row in range(400) if not journal.has(row)]
for start in range(0, len(rows), 7):
    journal.record([Answer(row, str(row), "stop") for row in rows[start:start + 7]])
    print(rows[start:start + 7][-1], flush=True)
journal.close()
"""


def test_what_was_said_to_be_written_survives_kills(tmp_path: Path) -> None:
    chance = random.Random(3)
    path = tmp_path / "job"
    ended = False
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
        )
        told = [process.stdout.readline().strip()]
        told += [process.stdout.readline().strip() for _ in range(chance.randrange(12))]
        time.sleep(chance.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        told += rest.split()
        ended = process.returncode == 0
        confirmed = [int(word) for word in told if word.isdigit()]
        rows = [answer.row for answer in read_answers(path, limit=1000)]
        assert set(confirmed) <= set(rows)
        assert len(rows) == len(set(rows))
        if ended:
            break
    journal = Journal(path, _MANIFEST)
    journal.record([_answer(row) for row in range(400) if not journal.has(row)])
    assert [answer.row for answer in journal.answers()] == list(range(400))
    journal.close()


def test_an_input_that_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text\na\n")
    source = open_source(path)
    before, hashed = stamp(source), content_hash(source)
    assert (stamp(source), content_hash(source)) == (before, hashed)
    path.write_text("text\nb\n")
    os.utime(path, ns=(1, 1))
    assert stamp(source) != before
    assert content_hash(source) != hashed
    path.unlink()
    assert stamp(source) != before
    with pytest.raises(EngineError):
        content_hash(source)


def _input(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"text": f"row {index}", "answer": index, "nested": {"a": [index]}} for index in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


_ANSWERS = [Answer(0, "=1+1", "stop", 2, 3), failed(2, "is empty"), Answer(4, 'say "x",\nthen \x07', "length", 1, 1)]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet", ".xlsx"])
def test_results_keep_the_columns_and_add_the_answer(tmp_path: Path, suffix: str) -> None:
    source = open_source(_input(tmp_path))
    output = tmp_path / f"out{suffix}"
    check_output(output, source)
    assert write_result(output, source, _ANSWERS) == Written(3, output, output)
    written = open_source(output)
    assert written.columns == (
        *("text", "answer", "nested"),
        *("answer_2", "finish_reason", "prompt_tokens", "generated_tokens", "problem"),
    )
    rows = [dict(row.fields) for row in written.rows()]
    assert [row["text"] for row in rows] == ["row 0", "row 2", "row 4"]
    assert rows[0]["answer_2"] == ("'=1+1" if suffix in (".csv", ".tsv") else "=1+1")
    assert rows[1]["problem"] == "is empty"
    assert str(rows[2]["generated_tokens"]) == "1"
    assert rows[2]["answer_2"].startswith('say "x",\nthen')
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_sheet_holds_no_formulas(tmp_path: Path) -> None:
    source = open_source(_input(tmp_path))
    write_result(tmp_path / "out.xlsx", source, _ANSWERS)
    cell = openpyxl.load_workbook(tmp_path / "out.xlsx").active["D2"]
    assert (cell.value, cell.data_type) == ("=1+1", "s")


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "when": pa.array([1, 2], pa.timestamp("ms")), "deep": [[{"x": 1}], []]})
    pq.write_table(table, tmp_path / "in.parquet")
    source = open_source(tmp_path / "in.parquet")
    write_result(tmp_path / "out.parquet", source, [Answer(0, "x", "stop"), Answer(1, "y", "stop")])
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.select(["text", "when", "deep"]).equals(table)
    assert written.column("answer").to_pylist() == ["x", "y"]


def test_a_failing_write_leaves_the_old_result(tmp_path: Path) -> None:
    source = open_source(_input(tmp_path))
    output = tmp_path / "out.csv"
    output.write_text("old")

    def broken():  # type: ignore[no-untyped-def]
        yield _ANSWERS[0]
        raise OSError(28, "No space left on device")

    with refused(ErrorCode.DISK_FULL):
        write_result(output, source, broken())
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv"]


def test_outputs_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    source = open_source(_input(tmp_path))
    for output in (tmp_path / "out.doc", tmp_path, tmp_path / "no" / "out.csv", source.path):
        with pytest.raises(EngineError):
            check_output(output, source)


def test_openai_answers_and_failures_go_into_two_files(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    rows = [{"custom_id": f"c{index}", "method": "POST", "url": "u", "body": body} for index in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(path)
    output = tmp_path / "out.jsonl"
    answers = [Answer(0, "yes", "stop_string", 4, 2), failed(1, "is odd")]
    ledger = Remembered()
    written = write_result(output, source, answers, ledger=ledger, openai=True, created_s=1_700_000_000)
    assert written == Written(2, output, output, errors_path(output))
    (good,) = [json.loads(line) for line in output.read_text().splitlines()]
    (bad,) = [json.loads(line) for line in errors_path(output).read_text().splitlines()]
    assert good["custom_id"] == "c0"
    assert good["response"]["status_code"] == 200
    assert good["error"] is None
    body = good["response"]["body"]
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1_700_000_000, "m")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}
    assert good["response"]["body"]["choices"][0]["finish_reason"] == "stop"
    assert good["response"]["body"]["usage"]["total_tokens"] == 6
    assert (bad["custom_id"], bad["error"], bad["response"]["status_code"]) == ("c1", None, 400)
    assert bad["response"]["body"]["error"] == {
        "message": "The row is odd.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    write_result(output, source, [Answer(0, "yes", "stop")], ledger=ledger, openai=True)
    assert not errors_path(output).exists()


def test_csv_results_open_in_spreadsheets(tmp_path: Path) -> None:
    source = open_source(_input(tmp_path))
    write_result(tmp_path / "out.csv", source, _ANSWERS)
    with open(tmp_path / "out.csv", encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[1][2] == '{"a": [0]}'
