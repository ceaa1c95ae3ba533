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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import EngineError, ErrorCode
from engine.experts.cache.policies import POLICY_NAMES
from engine.experts.direct_file import bytes_of
from engine.experts.disk_tier import DiskTier, Read
from engine.experts.ram_pressure import RamPressure
from engine.experts.ram_tier import Acquired, RamTier
from engine.experts.record_memory import CAN_GIVE_BACK, RecordMemory
from engine.experts.slot_group import ADAPTIVE, share_slots
from tests.engine.made_up_bank import LARGE, SMALL, flip, header_of, random_records, write_bank

HEADER = header_of([(6, SMALL), (3, LARGE), (6, SMALL)])
RECORDS = random_records(HEADER)
BUDGET = 5 * SMALL.nbytes + 2 * LARGE.nbytes
POLICIES = (*POLICY_NAMES, ADAPTIVE)
POPULARITY = {key: float(key % 5) for key in range(18)}


def make_tier(disk: Any, budget: int = BUDGET, policy: str = ADAPTIVE, at_least: int = 2) -> RamTier:
    popularity = POPULARITY if policy == "static" else None
    return RamTier(disk, budget, policy=policy, popularity=popularity, at_least=at_least)


class HeldDisk:
    """Reads that end when the test says so: the one thing about a disk that cannot be had from a real one."""

    header = HEADER

    def __init__(self) -> None:
        self.waiting: list[Read] = []
        self.hurried: list[Read] = []
        self.closed = False

    def read(self, layer: int, expert: int, into: torch.Tensor, *, urgent: bool) -> Read:
        if self.closed:
            raise EngineError(ErrorCode.INTERNAL, "closed")
        into.fill_(0xEE)  # what was in the slot is gone from the moment that the read begins
        read = Read(layer, expert, 1, bytes_of(into))
        self.waiting.append(read)
        return read

    def hurry(self, read: Read) -> None:
        self.hurried.append(read)

    def end(self, read: Read, error: BaseException | None = None) -> None:
        self.waiting.remove(read)
        if error is not None:
            read.set_exception(error)
            return
        read.target[:] = bytes_of(RECORDS[read.layer][read.expert])
        read.set_result(None)


class RamTierMachine(RuleBasedStateMachine):
    """Any order of acquiring, releasing, prefetching, and of reads that end well or do not."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        small=st.integers(1, 12),
        large=st.integers(1, 3),
    )
    def begin(self, policy: str, small: int, large: int) -> None:
        self.disk = HeldDisk()
        self.tier = make_tier(self.disk, small * SMALL.nbytes + large * LARGE.nbytes, policy, at_least=1)
        self.held: list[Acquired] = []
        self.given = self.read_well = self.failed = 0

    @rule(layer=st.integers(0, 2), experts=st.sets(st.integers(0, 5), min_size=1, max_size=4))
    def acquire(self, layer: int, experts: set[int]) -> None:
        wanted = [expert for expert in experts if expert < HEADER.layers[layer].num_experts]
        if not wanted:
            return
        group = self.tier._groups[layer]
        keys = {self.tier.key_of(layer, expert) for expert in wanted}
        pool = group.pool
        pinned = {self.tier.key_of(held.layer, expert) for held in self.held for expert in held.slots}
        possible = (
            keys & (pool.residents.keys() | pool.arriving.keys()) or group.pool.free or pool.residents.keys() - pinned
        )
        if not possible and pool.arriving:
            return  # it would wait for a read to end, and here nobody ends it meanwhile
        was_resident = {e for e in wanted if self.tier.key_of(layer, e) in pool.residents}
        acquired = self.tier.acquire(layer, wanted)
        assert acquired.slots.keys() | set(acquired.left) == set(wanted)
        assert not acquired.slots.keys() & set(acquired.left)
        assert was_resident == acquired.slots.keys() - acquired.arriving.keys()
        assert bool(acquired.slots) == bool(possible)
        self.given += len(acquired.slots)
        self.held.append(acquired)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        acquired = data.draw(st.sampled_from(self.held))
        self.held.remove(acquired)
        self.tier.release(acquired)
        self.tier.release(acquired)

    @rule(
        layer=st.integers(0, 2),
        experts=st.lists(st.integers(0, 2), max_size=3),
        dead=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4),
    )
    def prefetch(self, layer: int, experts: list[int], dead: list[tuple[int, int]]) -> None:
        group = self.tier._groups[layer]
        before, free = dict(group.pool.residents), group.pool.free
        started = self.tier.prefetch(layer, experts, dead)
        gone = before.keys() - group.pool.residents.keys()
        assert gone <= {self.tier.key_of(*pair) for pair in dead}
        assert started == free - group.pool.free + len(gone)

    @rule(small=st.integers(0, 14), large=st.integers(0, 4))
    def resize(self, small: int, large: int) -> None:
        budget = small * SMALL.nbytes + large * LARGE.nbytes
        used = [(g, key, s) for g in self.tier._distinct for key, s in g.pool.residents.items() if g.pool.is_used(key)]
        flying = [dict(group.pool.arriving) for group in self.tier._distinct]
        now = self.tier.resize(budget)
        assert now == self.tier.nbytes
        assert all(group.pool.residents[key] == slot for group, key, slot in used)
        assert flying == [dict(group.pool.arriving) for group in self.tier._distinct]
        shares = share_slots(HEADER, max(budget, SMALL.nbytes + LARGE.nbytes), 1)
        for group in self.tier._distinct:
            busy = sum(group is one for one, _, _ in used) + len(group.pool.arriving)
            assert group.pool.capacity == max(shares[group.slots.layout], min(busy, group.pool.capacity))

    @rule(layer=st.integers(0, 2))
    def hold(self, layer: int) -> None:
        count = HEADER.layers[layer].num_experts
        absent, there = self.tier.absent(layer, range(count)), self.tier.resident(layer)
        held = self.tier.hold(layer, range(count))
        assert held.slots == there
        assert not there.keys() & set(absent)
        self.tier.release(held)

    @precondition(lambda self: self.disk.waiting)
    @rule(data=st.data(), well=st.booleans())
    def end_read(self, data: st.DataObject, well: bool) -> None:
        read = data.draw(st.sampled_from(self.disk.waiting))
        key = self.tier.key_of(read.layer, read.expert)
        if well:
            self.disk.end(read)
            self.read_well += HEADER.layers[read.layer].layout.nbytes
            assert key in self.tier._groups[read.layer].pool.residents
            return
        self.disk.end(read, EngineError(ErrorCode.CHECKPOINT_DAMAGED, "torn"))
        self.failed += 1
        for held in self.held:
            if held.layer == read.layer and read.expert in held.slots:
                arrival = held.arriving[read.expert]
                if arrival.done() and arrival.exception() is not None:
                    self.tier.release(held)
        self.held = [held for held in self.held if held.slots]

    @invariant()
    def what_is_held_is_there(self) -> None:
        if not hasattr(self, "tier"):
            return
        for held in self.held:
            pool = self.tier._groups[held.layer].pool
            for expert, slot in held.slots.items():
                key = self.tier.key_of(held.layer, expert)
                assert (pool.residents.get(key), pool.arriving.get(key)).count(slot) == 1
                arrival = held.arriving.get(expert)
                assert (key in pool.residents) == (arrival is None or arrival.done())

    @invariant()
    def what_is_resident_is_that_expert(self) -> None:
        if not hasattr(self, "tier"):
            return
        for group in self.tier._distinct:
            pool, records = group.pool, group.slots.records
            taken = [*pool.residents.values(), *pool.arriving.values()]
            assert len(taken) == len(set(taken))
            assert pool.capacity + len(group._unused) == len(records)
            assert not set(taken) & set(group._unused)
            for key, slot in pool.residents.items():
                layer, expert = divmod(key, 6)
                assert torch.equal(records[slot], RECORDS[layer][expert])
        in_flight = {self.tier.key_of(read.layer, read.expert) for read in self.disk.waiting}
        assert in_flight == {key for group in self.tier._distinct for key in group.pool.arriving}
        assert self.tier.backlog_bytes == sum(HEADER.layers[key // 6].layout.nbytes for key in in_flight)

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "tier"):
            return
        counters = self.tier.counters
        assert counters.hits + counters.late + counters.misses == self.given
        assert counters.bytes_read == self.read_well
        assert counters.failures == self.failed
        assert counters.prefetches_used + counters.prefetches_wasted <= counters.prefetched

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for read in list(self.disk.waiting):
            self.disk.end(read)
        self.tier.close()


RamTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRamTier = RamTierMachine.TestCase


@pytest.mark.parametrize("policy", POLICIES)
def test_many_threads_on_a_real_disk(policy: str, tmp_path: Path) -> None:
    """Every record that is there is the right one, damaged ones are told, and nobody waits for ever."""
    path = tmp_path / "a.bank"
    write_bank(path, HEADER)
    flip(path, HEADER.record_offset(2, 4) + 99)
    wrong: list[str] = []
    damaged: list[tuple[int, int]] = []

    def use(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            layer = dice.randrange(3)
            left = dice.sample(range(HEADER.layers[layer].num_experts), dice.randint(1, 3))
            while left:
                acquired = tier.acquire(layer, left)
                try:
                    acquired.wait()
                    for expert, slot in acquired.slots.items():
                        if not torch.equal(tier.slots(layer).records[slot], RECORDS[layer][expert]):
                            wrong.append(f"{layer} {expert}")
                except EngineError as error:
                    damaged.append((layer, 4 if "Expert 4" in error.message else -1))
                left = acquired.left
                tier.release(acquired)
                if not acquired.arriving:
                    time.sleep(0)
            if dice.random() < 0.5:
                ahead = (layer + 1) % 3
                dead = [(layer, expert) for expert in range(3)]
                tier.prefetch(ahead, dice.sample(range(3), 2), dead)
            if dice.random() < 0.1:
                tier.resize(dice.randrange(2 * BUDGET))

    with DiskTier(path, HEADER, readers=3) as disk, make_tier(disk, BUDGET, policy) as tier:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tier.close()
        counters = tier.counters
        assert counters.bytes_read == disk.bytes_read
    assert wrong == []
    assert set(damaged) <= {(2, 4)}
    assert counters.failures > 0
    assert counters.hits
    assert counters.misses
    assert counters.evictions


def test_a_read_that_failed_is_tried_anew() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    first = tier.acquire(0, [1])
    disk.end(disk.waiting[0], EngineError(ErrorCode.CHECKPOINT_DAMAGED, "torn"))
    with pytest.raises(EngineError, match="torn"):
        first.wait()
    second = tier.acquire(0, [1])
    tier.release(first)
    disk.end(disk.waiting[0])
    second.wait()
    assert torch.equal(tier.slots(0).records[second.slots[1]], RECORDS[0][1])
    tier.release(second)
    tier.close()


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
    acquired.wait()
    tier.release(acquired)
    tier.acquire(0, [3, 4, 5])  # all slots are taken now: the next two take the places of the first two
    tier.acquire(2, [0, 1])
    assert tier.counters.prefetches_wasted == 1
    for read in list(disk.waiting):
        disk.end(read)
    tier.close()


def test_what_all_slots_are_too_few_for_is_left() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    first = tier.acquire(1, [0, 1, 2])
    assert (sorted(first.slots), first.left) == ([0, 1], [2])
    for read in list(disk.waiting):
        disk.end(read)
    second = tier.acquire(1, first.left)
    assert (second.slots, second.left) == ({}, [2])  # all are held: it says so rather than wait for ever
    tier.release(first)
    assert list(tier.acquire(1, second.left).slots) == [2]
    disk.end(disk.waiting[0])
    tier.close()


def test_it_waits_for_prefetches_that_have_all_slots() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    tier.prefetch(1, [0, 1])
    given: list[Acquired] = []
    thread = threading.Thread(target=lambda: given.append(tier.acquire(1, [2])))
    thread.start()
    disk.end(disk.waiting[0])
    thread.join()
    assert list(given[0].slots) == [2]
    for read in list(disk.waiting):
        disk.end(read)
    tier.close()


def test_a_closed_disk_fails_what_is_asked_for_and_nothing_hangs() -> None:
    disk = HeldDisk()
    tier = make_tier(disk)
    disk.closed = True
    acquired = tier.acquire(0, [1])
    with pytest.raises(EngineError, match="closed"):
        acquired.wait()
    assert tier.prefetch(0, [2]) == 0
    tier.release(acquired)
    assert tier.counters.failures == 2
    tier.close()
    tier.close()
    with pytest.raises(EngineError, match="closed"):
        cast(Any, tier).acquire(0, [1])


def test_memory_that_is_refused_is_asked_for_again_by_half(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = list[int]()

    def allocate(count: int, nbytes: int) -> Any:
        if count > 4:
            refused.append(count)
            raise MemoryError("no")
        return RecordMemory(count, nbytes)

    monkeypatch.setattr("engine.experts.slot_group.RecordMemory", allocate)
    tier = make_tier(HeldDisk(), HEADER.records_nbytes)
    assert refused
    assert tier.note is not None
    assert 0 < tier.nbytes <= HEADER.records_nbytes // 2
    tier.close()


def full_tier(disk: HeldDisk, **options: Any) -> RamTier:
    """Every expert is in RAM."""
    tier = RamTier(disk, HEADER.records_nbytes, policy="lru", **options)  # type: ignore[arg-type]
    for layer in range(3):
        acquired = tier.acquire(layer, range(HEADER.layers[layer].num_experts))
        for read in list(disk.waiting):
            disk.end(read)
        tier.release(acquired)
    return tier


def test_a_smaller_tier_keeps_who_was_used_last_and_gives_the_last_slots_back() -> None:
    disk = HeldDisk()
    tier = full_tier(disk)
    tier.release(tier.acquire(0, [4, 5]))
    assert tier.resize(5 * SMALL.nbytes + LARGE.nbytes) == 5 * SMALL.nbytes + LARGE.nbytes
    assert tier.resident(0).keys() == {4, 5}
    assert tier.resident(2).keys() == {3, 4, 5}
    assert sorted([*tier.resident(0).values(), *tier.resident(2).values()]) == [0, 1, 2, 3, 4]
    for layer in (0, 2):
        for expert, slot in tier.resident(layer).items():
            assert torch.equal(tier.slots(layer).records[slot], RECORDS[layer][expert])
    assert tier.counters.evictions == 7 + 2
    assert tier.resize(10**9) == HEADER.records_nbytes
    assert tier.capacity(0) == 12
    tier.close()


def test_memory_that_is_given_back_returns_to_the_system() -> None:
    memory = RecordMemory(1000, SMALL.nbytes)
    process = psutil.Process()
    memory.records.fill_(1)
    before = process.memory_info().rss
    memory.give_back([*range(100, 1000), 3])
    if CAN_GIVE_BACK and sys.platform == "linux":
        assert process.memory_info().rss < before - 700 * SMALL.nbytes
        assert not memory.records[500].any()
    assert memory.records[[*range(3), *range(4, 100)]].all()
    memory.records[500] = 7
    assert memory.records[500].all()


@pytest.mark.skipif(not CAN_GIVE_BACK, reason="memory stays with us here")
def test_another_program_takes_the_ram_and_gives_it_back() -> None:
    free, now_s = 10**9, 0.0
    whole = HEADER.records_nbytes
    pressure = RamPressure(whole, 2 * LARGE.nbytes, available=lambda: free, clock=lambda: now_s)
    disk = HeldDisk()
    tier = full_tier(disk, pressure=pressure)
    assert tier.note is None
    held = tier.acquire(1, [0])

    def step() -> None:
        nonlocal now_s
        now_s += 1.0
        tier.release(tier.acquire(0, [0]))
        for read in list(disk.waiting):
            disk.end(read)

    step()
    assert tier.nbytes == whole
    free = 0
    step()
    smaller = tier.nbytes
    assert smaller <= whole - 2 * LARGE.nbytes
    assert "Other programs need RAM" in str(tier.note)
    assert held.slots.items() <= tier.resident(1).items()
    free = 10**9
    step()
    assert tier.nbytes == smaller  # whoever took it may want more
    now_s += 20
    for _ in range(3):
        step()
    assert tier.nbytes == whole
    assert tier.note is None
    tier.release(held)
    tier.close()


@given(st.data())
@settings(deadline=None, max_examples=200)
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
    all_of_it = share_slots(HEADER, 10**12, 2)
    assert all_of_it == {SMALL: 12, LARGE: 3}
    least = 2 * (SMALL.nbytes + LARGE.nbytes)
    assert share_slots(HEADER, least, 2) == {SMALL: 2, LARGE: 2}
    for budget in range(least, HEADER.records_nbytes, 5000):
        shares = share_slots(HEADER, budget, 2)
        used = sum(layout.nbytes * count for layout, count in shares.items())
        assert used <= budget
        assert budget - used < LARGE.nbytes + SMALL.nbytes
    with pytest.raises(EngineError) as caught:
        share_slots(HEADER, least - 1, 2)
    assert caught.value.code == ErrorCode.NOT_ENOUGH_MEMORY
