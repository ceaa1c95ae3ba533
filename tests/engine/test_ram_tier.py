"""The RAM tier: whatever happens in whatever order, an expert that is held is there, and it is that expert."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.experts.ram_tier import RamPressure, RamTier, share_slots
from engine.experts.record import RecordMemory, RecordTable
from engine.experts.record_source import Held
from engine.kernels.native.paged_attention import CAN_DISCARD
from tests.engine.made_up_records import LARGE, SMALL, disk_of, flip, place_of, write_records
from tests.engine.ram_tier_parts import BUDGET, CONTENTS, POLICIES, RECORDS, HeldDisk, arrived, make_tier


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


def test_a_prefetch_that_is_wanted_is_hurried_and_counted() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    assert tier.prefetch(0, [1, 2, 2]) == 2
    acquired = tier.acquire(0, [1])
    assert disk.hurried == disk.waiting[:1]
    assert not acquired.arriving[1].done()
    counters = tier.counters
    assert (counters.late, counters.hits, counters.misses, counters.prefetches_used) == (1, 0, 0, 1)
    for read in list(disk.waiting):
        disk.end(read)
    arrived(acquired)
    acquired.release()
    tier.acquire(0, [3, 4, 5])  # all slots are taken now: the next two take the places of the first two
    tier.acquire(2, [0, 1])
    assert tier.counters.prefetches_wasted == 1
    for read in list(disk.waiting):
        disk.end(read)
    tier.close()


def test_it_waits_for_prefetches_that_have_all_slots() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    tier.prefetch(1, [0, 1])
    got: list[Held] = []
    thread = threading.Thread(target=lambda: got.append(tier.acquire(1, [2])))
    thread.start()
    disk.end(disk.waiting[0])
    thread.join()
    assert list(got[0].rows) == [2]
    for read in list(disk.waiting):
        disk.end(read)
    tier.close()


def test_a_closed_disk_fails_what_is_asked_for_and_nothing_hangs() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    disk.closed = True
    acquired = tier.acquire(0, [1])
    with pytest.raises(EngineError, match="closed"):
        arrived(acquired)
    assert tier.prefetch(0, [2]) == 0
    acquired.release()
    assert tier.counters.failures == 2
    tier.close()
    tier.close()
    with pytest.raises(EngineError, match="closed"):
        cast(Any, tier).acquire(0, [1])


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


def test_a_smaller_tier_keeps_who_was_used_last_and_gives_the_last_slots_back() -> None:
    disk = HeldDisk()
    tier = full_tier(disk)
    tier.acquire(0, [4, 5]).release()
    assert tier.resize(5 * SMALL.nbytes + LARGE.nbytes) == 5 * SMALL.nbytes + LARGE.nbytes
    assert tier.resident(0).keys() == {4, 5}
    assert tier.resident(2).keys() == {3, 4, 5}
    assert sorted([*tier.resident(0).values(), *tier.resident(2).values()]) == [0, 1, 2, 3, 4]
    for layer in (0, 2):
        for expert, slot in tier.resident(layer).items():
            assert torch.equal(tier.slots(layer).records[slot], RECORDS[layer][expert])
    assert tier.counters.evictions == 7 + 2
    assert tier.resize(10**9) == CONTENTS.nbytes
    assert tier.capacity(0) == 12
    tier.close()


def test_memory_that_is_given_back_returns_to_the_system() -> None:
    memory = RecordMemory(1000, SMALL.nbytes)
    process = psutil.Process()
    memory.records.fill_(1)
    before = process.memory_info().rss
    memory.give_back([*range(100, 1000), 3])
    if CAN_DISCARD and sys.platform == "linux":
        assert process.memory_info().rss < before - 700 * SMALL.nbytes
        assert not memory.records[500].any()
    assert memory.records[[*range(3), *range(4, 100)]].all()
    memory.records[500] = 7
    assert memory.records[500].all()


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
    with pytest.raises(EngineError) as caught:
        share_slots(RecordTable(CONTENTS.tensors), least - 1, 2)
    assert caught.value.code == ErrorCode.NOT_ENOUGH_MEMORY
