"""What a job says of its pace, and how answers wait for room on a disk."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.batch_files.job_watcher import ComputingClock, PaceMeter
from engine.batch_files.journal import JobManifest, Journal, SafeKeeping
from engine.batch_files.rows import Answer, failed
from engine.common.errors import EngineError, ErrorCode

_MANIFEST = JobManifest("hash", "{{text}}", "", "model", "bf16", "{}", "", "{}")


def test_a_steady_pace_is_told_with_a_range_that_holds_it() -> None:
    meter = PaceMeter(done=10, failed=1, now=0.0)
    assert meter.pace(110, 0.0).remaining_low_s is None
    for second in range(1, 61):
        meter.ended(failed=False, generated_tokens=20)
        pace = meter.pace(110, float(second))
    assert (pace.done, pace.failed, pace.total) == (70, 1, 110)
    assert pace.tokens_per_s == 20
    assert pace.remaining_low_s is not None
    assert pace.remaining_high_s is not None
    assert pace.remaining_low_s <= 40 <= pace.remaining_high_s


@given(
    st.lists(
        st.tuples(st.floats(0.01, 500), st.booleans(), st.integers(0, 500), st.booleans()), min_size=1, max_size=60
    ),
    st.integers(0, 1000),
)
def test_no_pace_is_negative_and_ranges_are_in_order(steps: list[tuple[float, bool, int, bool]], total: int) -> None:
    meter, now = PaceMeter(0, 0, 0.0), 0.0
    for elapsed, ends, tokens, bad in steps:
        now += elapsed
        if ends:
            meter.ended(failed=bad, generated_tokens=tokens)
        pace = meter.pace(total, now)
        assert pace.tokens_per_s >= 0
        if pace.remaining_low_s is not None and pace.remaining_high_s is not None:
            assert 0 <= pace.remaining_low_s <= pace.remaining_high_s


@given(st.integers(1, 400), st.integers(1, 400), st.integers(10, 100))
def test_no_job_takes_longer_than_if_every_answer_were_as_long_as_it_may_be(ended: int, left: int, tokens: int) -> None:
    meter = PaceMeter(0, 0, 0.0, most_tokens=100)
    meter.pace(ended + left, 0.0)
    for _ in range(ended):
        meter.ended(failed=False, generated_tokens=tokens)
    pace = meter.pace(ended + left, 60.0)
    assert pace.remaining_low_s is not None
    assert pace.remaining_high_s is not None
    assert pace.remaining_low_s <= pace.remaining_high_s <= left * 100 / pace.tokens_per_s + 1e-6


def test_waiting_is_no_computing_and_sinks_no_rate() -> None:
    now = [100.0]
    clock = ComputingClock(lambda: now[0])
    meter = PaceMeter(0, 0, clock.now())
    for _ in range(10):
        now[0] += 2
        meter.ended(failed=False, generated_tokens=100)
    before = meter.pace(20, clock.now())
    with clock.stopped():
        now[0] += 1000
        with clock.stopped():
            now[0] += 1000
        assert meter.pace(20, clock.now()) == before
    assert meter.pace(20, clock.now()) == before
    now[0] += 2
    assert clock.now() == 22


class _FullFor:
    """A journal on a disk that is full for the first so many writes."""

    def __init__(self, journal: Journal, refusals: int) -> None:
        self._journal = journal
        self.refusals = refusals

    def record(self, answers: list[Answer]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EngineError(ErrorCode.DISK_FULL, "The disk is full.")
        self._journal.record(answers)


def test_a_full_disk_delays_answers_and_loses_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job", _MANIFEST)
    full = _FullFor(journal, 3)
    keeping = SafeKeeping(full, clock=lambda: 0.0)  # type: ignore[arg-type]
    for row in range(100):
        keeping.keep(Answer(row, "x", "stop") if row % 2 else failed(row, "is odd"))
    assert keeping.problem == "The disk is full."
    assert full.refusals == 2, "a disk that is full is asked again when its owner says so, not for every answer"
    assert [keeping.flush() for _ in range(3)] == [False, False, True]
    assert keeping.problem == ""
    assert [answer.row for answer in journal.answers()] == list(range(100))
    journal.close()
