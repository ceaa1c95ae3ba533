"""The clockwork of a download, on a clock of the test's own."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from engine.checkpoint.downloads.pace import FIRST_CONNECTIONS, MOST_CONNECTIONS, Crew, Limit, Meter, Waits
from engine.checkpoint.downloads.parts import Journal


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def test_the_rate_is_that_of_the_last_seconds_and_falls_to_nothing(time: Time) -> None:
    meter = Meter(time)
    assert meter.eta_s(1000) is None
    for _ in range(40):
        time.now += 0.25
        meter.add(250)
        meter.rate()
    assert meter.rate() == pytest.approx(1000, rel=0.1)
    assert meter.eta_s(30_000) == pytest.approx(30, rel=0.1)
    rates = []
    for _ in range(30):
        time.now += 0.25
        rates.append(meter.rate())
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0
    assert meter.eta_s(30_000) is None
    assert meter.eta_s(0) == 0


def test_a_limit_is_kept_to_whatever_the_lines_do(time: Time) -> None:
    limit = Limit(time, time.sleep)
    limit.set(1000)
    begun = time.now
    for _ in range(100):
        limit.wait(100, lambda: False)
    assert time.now - begun == pytest.approx(10, rel=0.02)
    time.now += 1000  # time in which nothing came is not saved up
    begun = time.now
    for _ in range(100):
        limit.wait(100, lambda: False)
    assert time.now - begun == pytest.approx(10, rel=0.02)


def test_a_limit_can_be_lifted_while_somebody_waits(time: Time) -> None:
    limit = Limit(time, lambda seconds: (time.sleep(seconds), limit.set(0))[0])
    limit.set(1)
    begun = time.now
    limit.wait(1000, lambda: False)
    assert time.now - begun < 1
    limit.set(1)
    stopped = time.now
    limit.wait(1000, lambda: True)
    assert time.now == stopped


def looked(crew: Crew, time: Time, rate_of: dict[str, float], steps: int) -> int:
    for _ in range(steps):
        time.now += 2.1
        crew.look(min(crew.wanted * rate_of["each"], rate_of["all"]))
    return crew.wanted


def test_more_lines_as_long_as_they_bring_more(time: Time) -> None:
    assert looked(Crew(time), time, {"each": 10.0, "all": 1e9}, 8) == MOST_CONNECTIONS
    assert looked(Crew(time), time, {"each": 10.0, "all": 30.0}, 8) == FIRST_CONNECTIONS
    assert Crew(time).look(1e9, limit_bytes_per_s=50_000) == 1


def test_a_server_that_has_enough_gets_fewer(time: Time) -> None:
    crew = Crew(time)
    looked(crew, time, {"each": 10.0, "all": 1e9}, 8)
    crew.too_many()
    assert crew.wanted == MOST_CONNECTIONS // 2
    assert looked(crew, time, {"each": 10.0, "all": 1e9}, 100) == MOST_CONNECTIONS // 2
    for _ in range(9):
        crew.too_many()
    assert crew.wanted == 1


def test_waits_grow_with_jitter_and_start_over(time: Time) -> None:
    waits, lengths = Waits(time), []
    for _ in range(20):
        waits.failed()
        waits.failed()  # another line, at the same moment
        lengths.append(waits.left_s)
        time.now = waits.until
    assert lengths[0] <= Waits.FIRST_S
    assert Waits.LONGEST_S / 2 <= lengths[-1] <= Waits.LONGEST_S
    assert all(later > earlier / 2 for earlier, later in itertools.pairwise(lengths))
    waits.went_well()
    waits.failed()
    assert waits.left_s <= Waits.FIRST_S
    waits.failed(least_s=300)
    assert waits.left_s > 299


def test_a_journal_survives_being_torn_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin(0, 100)
    journal.pin(0, '"é 1"')
    journal.part(0, 3, 0xABC)
    journal.partial(0, 4, 50, 0xDEF)
    journal.part(0, 5, 0x123)
    journal.lost(0, 3)
    journal.search(0)
    journal.part(0, 5, 0x456)
    journal.begin(1, 10)
    journal.verified(1, "aa")
    journal.close()
    whole = path.read_bytes()
    read = Journal(path)
    read.close()
    record = read.of(0)
    assert (record.part_bytes, record.etag, record.digests) == (100, '"é 1"', {5: 0x456})
    assert (record.partial, record.searched, read.of(1).verified) == ({4: (50, 0xDEF)}, {5}, "aa")
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        torn = Journal(path)
        torn.part(2, 0, 1)
        torn.close()
        intact = sum(1 for n in range(len(lines)) if len(b"".join(lines[: n + 1])) <= cut)
        assert path.read_bytes().startswith(b"".join(lines[:intact]))
        again = Journal(path)
        again.close()
        assert again.of(2).digests == {0: 1}
    path.write_bytes(whole.replace(b"part 0 5", b"part 0 6", 1))
    flipped = Journal(path)
    flipped.close()
    assert 5 not in flipped.of(0).digests
