"""Experts on disk and in RAM: every read ends, right or with an error that says why; what is held is that expert."""

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.experts import disk_tier
from engine.experts.direct_file import DirectFile
from engine.experts.ram_tier import RamPressure, RamTier, share_slots
from engine.experts.record import RecordMemory, RecordTable, allocate_records
from engine.kernels.native.paged_attention import CAN_DISCARD
from tests.engine.made_up_records import (
    CPU,
    LARGE,
    SMALL,
    contents_of,
    disk_of,
    flip,
    place_of,
    random_records,
    write_records,
)
from tests.engine.ram_tier_parts import BUDGET, CONTENTS, POLICIES, RECORDS, HeldDisk, arrived, make_tier
from tests.refusals import refused

ON_DISK = contents_of([(16, SMALL), (8, LARGE), (16, SMALL)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_records(tmp_path / "a.gguf", ON_DISK)
    return tmp_path / "a.gguf"


def one(layer: int) -> torch.Tensor:
    return allocate_records(1, ON_DISK.tensors[layer].layout, CPU)[0]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("piece", [4096, disk_tier.PIECE_BYTES])
def test_many_reads_at_once(
    direct: bool, aligned: bool, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "PIECE_BYTES", piece)
    records = write_records(tmp_path / "a.gguf", ON_DISK)
    wanted = [(layer, expert) for layer, spec in enumerate(ON_DISK.tensors) for expert in range(spec.num_experts)] * 3
    random.Random(1).shuffle(wanted)
    with disk_of(tmp_path / "a.gguf", ON_DISK, direct=direct, readers=4) as disk:
        places = []
        for layer, _ in wanted:
            size = ON_DISK.tensors[layer].layout.nbytes
            places.append(one(layer) if aligned else torch.empty(size + 1, dtype=torch.uint8)[1:])
        reads = [
            disk.read(layer, expert, place, urgent=expert % 2 == 0)
            for (layer, expert), place in zip(wanted, places, strict=True)
        ]
        for read in reads[::3]:
            disk.hurry(read)
        for read, place, (layer, expert) in zip(reads, places, wanted, strict=True):
            read.result(60)
            assert torch.equal(place, records[layer][expert])
        assert disk.records_read == len(wanted)
        assert disk.bytes_read == 3 * ON_DISK.nbytes
        if not direct:
            assert not disk.is_direct


def test_many_who_meet_the_same_damage_have_it_repaired_once(path: Path) -> None:
    whole = path.read_bytes()
    begin = place_of(ON_DISK, 1, 3)
    good = random_records(ON_DISK)[1][3]
    flip(path, begin)
    calls = []

    def repair(layer: int, expert: int) -> torch.Tensor:
        calls.append((layer, expert))
        return good

    with disk_of(path, ON_DISK, repair=repair) as disk:
        places = [one(1) for _ in range(20)]
        for read in [disk.read(1, 3, place) for place in places]:
            read.result(60)
        assert all(torch.equal(place, good) for place in places)
        assert disk.records_repaired == len(calls) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("pieces", [4096, 2**21])
def test_what_the_disk_cannot_read_is_written_anew(path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "PIECE_BYTES", pieces)
    good, really, bad = random_records(ON_DISK)[1], DirectFile.read_into, {place_of(ON_DISK, 1, 3)}

    def fail(self: DirectFile, offset: int, target: memoryview) -> None:
        if any(offset <= place < offset + len(target) for place in bad):
            raise OSError(5, "Input/output error")
        really(self, offset, target)

    def repair(layer: int, expert: int) -> torch.Tensor:
        bad.remove(place_of(ON_DISK, layer, expert))
        return good[expert]

    monkeypatch.setattr(DirectFile, "read_into", fail)
    with disk_of(path, ON_DISK) as disk, pytest.raises(EngineError, match="cannot be read"):
        disk.read(1, 3, one(1)).result(60)
    with disk_of(path, ON_DISK, repair=repair) as disk:
        layer = allocate_records(8, LARGE, CPU)
        for read in [disk.read(1, expert, record) for expert, record in enumerate(layer)]:
            read.result(60)
        assert torch.equal(layer, good)
        assert disk.records_repaired == 1
        assert disk.note is not None


def test_a_file_that_becomes_shorter_under_us(path: Path) -> None:
    with disk_of(path, ON_DISK) as disk:
        os.truncate(path, place_of(ON_DISK, 2, 8))
        disk.read(2, 7, one(2)).result(60)
        for expert in (8, 15):
            with refused(ErrorCode.CHECKPOINT_DAMAGED, match="has become shorter"):
                disk.read(2, expert, one(2)).result(60)


def test_closing_ends_every_read_and_every_thread(path: Path) -> None:
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    before = threading.active_count()
    disk = disk_of(path, ON_DISK, readers=2)
    reads = [disk.read(1, expert % 8, one(1)) for expert in range(200)]
    disk.close()
    disk.close()
    assert all(read.done() for read in reads)
    ended_well = [read for read in reads if read.exception() is None]
    assert disk.records_read == len(ended_well)
    assert all("closed" in str(read.exception()) for read in reads if read.exception() is not None)
    assert threading.active_count() == before
    with pytest.raises(EngineError, match="closed"):
        disk.read(0, 0, one(0))
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) == open_files


def test_where_direct_access_is_refused_it_reads_as_others_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that do not know the flag, and on those that take it and refuse the first read."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no such flag here")
    really_open, really_read = os.open, os.preadv
    direct: set[int] = set()

    def refuse_to_open(name: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really_open(name, flags, *rest)  # type: ignore[arg-type]

    def remember(name: object, flags: int, *rest: int) -> int:
        descriptor = really_open(name, flags, *rest)  # type: ignore[arg-type]
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def refuse_to_read(descriptor: int, buffers: object, offset: int) -> int:
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return really_read(descriptor, buffers, offset)  # type: ignore[arg-type]

    for stand_in in (refuse_to_open, remember):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", stand_in)
            if stand_in is remember:
                patch.setattr(os, "preadv", refuse_to_read)
            with disk_of(path, ON_DISK, readers=1) as disk:
                assert not disk.is_direct
                disk.read(1, 0, one(1)).result(60)


def test_a_direct_read_that_is_refused_later_goes_on_as_others_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk_of(path, ON_DISK, readers=1) as disk:
        really_read, refused = os.preadv, list[int]()

        def refuse_once(descriptor: int, buffers: object, offset: int) -> int:
            if not refused:
                refused.append(descriptor)
                raise OSError(22, "Invalid argument")
            return really_read(descriptor, buffers, offset)  # type: ignore[arg-type]

        if not disk.is_direct:
            pytest.skip("this file system has no direct access")
        monkeypatch.setattr(os, "preadv", refuse_once)
        disk.read(1, 0, one(1)).result(60)
        assert refused


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_many_threads_on_a_real_disk(policy: str, tmp_path: Path) -> None:
    """Every record that is there is the right one, damaged ones are told, and nobody waits for ever."""
    path = tmp_path / "a.gguf"
    write_records(path, CONTENTS)
    flip(path, place_of(CONTENTS, 2, 4) + 99)
    wrong: list[str] = []
    damaged: list[tuple[int, int]] = []

    def use(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            layer = dice.randrange(3)
            left = dice.sample(range(CONTENTS.tensors[layer].num_experts), dice.randint(1, 3))
            while left:
                acquired = tier.acquire(layer, left)
                try:
                    arrived(acquired)
                    wrong.extend(
                        f"{layer} {expert}"
                        for expert in acquired.rows
                        if not torch.equal(acquired.record(expert), RECORDS[layer][expert])
                    )
                except EngineError as error:
                    damaged.append((layer, 4 if "Expert 4" in error.message else -1))
                left = acquired.left
                acquired.release()
                if not acquired.arriving:
                    time.sleep(0)
            if dice.random() < 0.5:
                ahead = (layer + 1) % 3
                dead = [(layer, expert) for expert in range(3)]
                tier.prefetch(ahead, dice.sample(range(3), 2), dead)
            if dice.random() < 0.1:
                tier.resize(dice.randrange(2 * BUDGET))

    with disk_of(path, CONTENTS, readers=3) as disk, make_tier(disk, BUDGET, policy) as tier:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tier.close()
        counters = tier.counters
        assert counters.kept_bytes + counters.post_fetched_bytes + counters.prefetched_bytes == disk.bytes_read
    assert wrong == []
    assert set(damaged) <= {(2, 4)}
    assert counters.failures > 0
    assert counters.hits
    assert counters.misses
    assert counters.evictions


# --- how much RAM it has


def test_memory_that_is_refused_is_asked_for_again_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = list[int]()

    def allocate(count: int, nbytes: int) -> Any:
        if count > 4:
            refused.append(count)
            raise MemoryError("no")
        return RecordMemory(count, nbytes)

    monkeypatch.setattr("engine.experts.ram_tier.RecordMemory", allocate)
    tier = make_tier(HeldDisk(), CONTENTS.nbytes)
    assert refused
    assert tier.note
    assert 0 < tier.nbytes <= CONTENTS.nbytes // 2
    tier.close()


def full_tier(disk: HeldDisk, **options: Any) -> RamTier:
    """Every expert is in RAM."""
    tier = RamTier(disk, CONTENTS.nbytes, policy="lru", **options)  # type: ignore[arg-type]
    for layer in range(3):
        acquired = tier.acquire(layer, range(CONTENTS.tensors[layer].num_experts))
        for read in list(disk.waiting):
            disk.end(read)
        acquired.release()
    return tier


@pytest.mark.skipif(not CAN_DISCARD, reason="memory stays with us here")
def test_another_program_takes_the_ram_and_gives_it_back() -> None:
    free, now_s = 10**9, 0.0
    whole = CONTENTS.nbytes
    pressure = RamPressure(whole, 2 * LARGE.nbytes, available=lambda: free, clock=lambda: now_s)
    disk = HeldDisk()
    tier = full_tier(disk, pressure=pressure)
    assert not tier.note
    held = tier.acquire(1, [0])

    def step() -> None:
        nonlocal now_s
        now_s += 1.0
        tier.acquire(0, [0]).release()
        for read in list(disk.waiting):
            disk.end(read)

    step()
    assert tier.nbytes == whole
    free = 0
    step()
    smaller = tier.nbytes
    assert smaller <= whole - 2 * LARGE.nbytes
    assert "Other programs need RAM" in str(tier.note)
    assert held.rows.items() <= tier.resident(1).items()
    free = 10**9
    step()
    assert tier.nbytes == smaller  # whoever took it may want more
    now_s += 20
    for _ in range(3):
        step()
    assert tier.nbytes == whole
    assert not tier.note
    held.release()
    tier.close()


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_what_is_left_to_others_ends_above_the_reserve(data: st.DataObject) -> None:
    """Whatever others take, the cache makes room for it as far as it has any."""
    mib = 2**20
    total, others, now_s = 10_000, 1000, 0.0
    budget, reserve = data.draw(st.integers(100, 8000)), data.draw(st.integers(10, 500))
    filled = 0

    def available() -> int:
        return (total - others - filled) * mib

    pressure = RamPressure(budget * mib, reserve * mib, available=available, clock=lambda: now_s)
    allowed = budget
    for _ in range(data.draw(st.integers(1, 30))):
        others = data.draw(st.integers(0, 9000))
        filled = data.draw(st.integers(0, allowed))
        now_s += data.draw(st.floats(0.3, 30.0))
        advised = pressure.advise(allowed * mib, filled * mib)
        if advised is None:
            assert available() >= reserve * mib or now_s == 0
            continue
        assert 0 <= advised <= budget * mib
        allowed = advised // mib
        if allowed < filled:
            assert available() < reserve * mib
            filled = allowed
            assert available() >= reserve * mib or allowed == 0
        assert pressure.advise(allowed * mib, filled * mib) is None  # asked again at once


def test_shares_of_the_budget() -> None:
    all_of_it = share_slots(RecordTable(CONTENTS.tensors), 10**12, 2)
    assert all_of_it == {SMALL: 12, LARGE: 3}
    least = 2 * (SMALL.nbytes + LARGE.nbytes)
    assert share_slots(RecordTable(CONTENTS.tensors), least, 2) == {SMALL: 2, LARGE: 2}
    for budget in range(least, CONTENTS.nbytes, 5000):
        shares = share_slots(RecordTable(CONTENTS.tensors), budget, 2)
        used = sum(layout.nbytes * count for layout, count in shares.items())
        assert used <= budget
        assert budget - used < LARGE.nbytes + SMALL.nbytes
    with refused(ErrorCode.NOT_ENOUGH_MEMORY):
        share_slots(RecordTable(CONTENTS.tensors), least - 1, 2)
