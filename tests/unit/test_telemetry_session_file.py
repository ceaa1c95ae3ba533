"""Sessions in files and their exports: whole, damaged, and as other programs read them."""

import csv
import io
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.telemetry import session_file
from engine.telemetry.lanes import GPU
from engine.telemetry.records import SPAN, Records, no_spans, no_steps
from engine.telemetry.session_file import MAGIC, SUFFIX, SessionWriter, list_sessions, read_session
from engine.telemetry.trace_export import trace_events, write_spans, write_steps, write_trace
from tests.refusals import refused
from tests.unit.recorded import span, spans, steps
from tests.unit.trace_format import check_trace

CHECKOUT = Path(__file__).resolve().parents[2]


def only_file(folder: Path) -> Path:
    (path,) = folder.glob(f"*{SUFFIX}")
    return path


@given(st.lists(spans(8), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_what_is_written_is_read(tmp_path: Path, batches: list[Records]) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    writer = SessionWriter(folder, {"model": "m"})
    writer.clock(5, 100.0)
    for batch in batches:
        writer.spans(batch)
    writer.steps(steps((0, 1)))
    writer.note("report", 7, {"slots": 3})
    writer.close()
    (paths,) = list_sessions(folder).values()
    session = read_session(paths)
    np.testing.assert_array_equal(session.spans, np.concatenate([np.empty(0, SPAN), *batches]))
    assert session.about["model"] == "m"
    assert session.steps["end_ns"].tolist() == [1]
    assert session.notes == [("report", 7, {"slots": 3})]
    assert session.wall_s(5 + 2 * 10**9) == 102.0
    assert session.is_whole


@given(cut=st.floats(0, 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_a_file_cut_short_is_read_up_to_the_cut(tmp_path: Path, cut: float) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    writer = SessionWriter(folder, {})
    for start in range(5):
        writer.spans(np.array([span(GPU, start, start + 1)]))
    writer.close()
    path = only_file(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))])
    try:
        session = read_session([path])
    except EngineError:
        return  # not even its first chunk is there
    assert session.spans["start_ns"].tolist() == list(range(len(session.spans)))
    assert session.is_whole or len(session.spans) < 5


@pytest.fixture(scope="module")
def five_spans(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of five chunks of one span each."""
    folder = tmp_path_factory.mktemp("five spans")
    writer = SessionWriter(folder, {})
    for start in range(5):
        writer.spans(np.array([span(GPU, start, start + 1)]))
    writer.close()
    return only_file(folder).read_bytes()


def assert_read_up_to_the_damage(path: Path, data: bytes, place: int, change: int) -> None:
    path.write_bytes(data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])
    try:
        session = read_session([path])
    except EngineError:
        return  # its magic or its first chunk is damaged
    assert session.spans["start_ns"].tolist() == list(range(len(session.spans)))
    assert len(session.spans) < 5
    assert not session.is_whole


def test_a_damaged_bit_before_any_payload_ends_what_can_be_read(tmp_path: Path, five_spans: bytes) -> None:
    """The kind of a chunk is a single byte: damage that changes it to another kind must not skip the chunk."""
    head, place = struct.Struct("<BII"), len(MAGIC)
    while place < len(five_spans):
        for byte, bit in itertools.product(range(head.size), range(8)):
            assert_read_up_to_the_damage(tmp_path / f"damaged{SUFFIX}", five_spans, place + byte, 1 << bit)
        place += head.size + head.unpack_from(five_spans, place)[1]


def test_a_killed_writer_has_lost_nothing(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; import numpy as np\n"
        "from engine.telemetry.session_file import SessionWriter; from tests.unit.recorded import span\n"
        f"writer = SessionWriter(Path({str(tmp_path)!r}), {{}})\n"
        "for start in range(50): writer.spans(np.array([span(1, start, start + 1)]))\n"
        "os.kill(os.getpid(), getattr(signal, 'SIGKILL', signal.SIGTERM))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, check=False)
    assert len(read_session([only_file(tmp_path)]).spans) == 50


def test_the_folder_stays_within_its_limit_and_the_newest_stay(tmp_path: Path) -> None:
    for session in range(4):
        writer = SessionWriter(tmp_path, {}, ring_bytes=40_000, file_bytes=10_000, started_s=float(session))
        rng = np.random.default_rng(session)
        for _ in range(30):
            noise = np.zeros(40, SPAN)
            noise["start_ns"] = rng.integers(0, 2**60, 40)
            writer.spans(noise)
        writer.close()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 40_000
    sessions = list_sessions(tmp_path)
    assert list(sessions) == sorted(sessions)
    newest = read_session(list(sessions.values())[-1])
    assert newest.is_whole
    assert len(newest.spans)


def test_two_sessions_of_one_moment_are_two(tmp_path: Path) -> None:
    writers = [SessionWriter(tmp_path, {}, started_s=1.0) for _ in range(2)]
    for writer in writers:
        writer.close()
    assert len(list_sessions(tmp_path)) == 2


def test_sessions_of_another_version_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(session_file, "NAMES", ("unheard of", "experts"))
        writer = SessionWriter(tmp_path, {})
    writer.spans(np.array([span(GPU, 0, 1, name=1), span(GPU, 1, 2, name=0)]))
    writer.close()
    from engine.telemetry.lanes import EXPERTS, NAMES

    first, second = read_session([only_file(tmp_path)]).spans["name"].tolist()
    assert first == EXPERTS
    assert second >= len(NAMES)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    with refused(ErrorCode.INVALID_REQUEST):
        read_session([tmp_path / "x"])
    with refused(ErrorCode.INVALID_REQUEST):
        read_session([tmp_path / "absent"])


STEPS = steps((0, 5000), (5000, 9000), hits=3, on_cpu=1, h2d_bytes=70)


@given(spans())
def test_any_spans_make_a_valid_trace(records: Records) -> None:
    events = list(trace_events(records, STEPS))
    check_trace({"displayTimeUnit": "ms", "traceEvents": json.loads(json.dumps(events))})
    shown = [event for event in events if event["ph"] in "Xb"]
    assert len(shown) == len(records)
    assert sum(event["args"].get("bytes", 0) for event in shown) == int(records["nbytes"].sum())


def test_nothing_recorded_is_a_valid_trace_too(tmp_path: Path) -> None:
    write_trace(no_spans(), no_steps(), tmp_path / "trace.json")
    check_trace(json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")))


@given(spans())
def test_tables_have_a_row_for_each(records: Records) -> None:
    table = io.StringIO()
    write_spans(records, table)
    rows = list(csv.DictReader(io.StringIO(table.getvalue())))
    assert sorted(int(row["start_ns"]) for row in rows) == [int(row["start_ns"]) for row in rows]
    assert sum(int(row["nbytes"]) for row in rows) == int(records["nbytes"].sum())
    table = io.StringIO()
    write_steps(STEPS, table)
    assert [row["hits"] for row in csv.DictReader(io.StringIO(table.getvalue()))] == ["3", "3"]


@given(place=st.integers(0, 10**6), change=st.integers(1, 255))
@example(place=362881, change=1)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_a_damaged_byte_ends_what_can_be_read(tmp_path: Path, five_spans: bytes, place: int, change: int) -> None:
    assert_read_up_to_the_damage(tmp_path / f"damaged{SUFFIX}", five_spans, place % len(five_spans), change)
