"""The RAM tier in any order of uses, prefetches, failures and resizes: what is held is there, and it is that expert."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.common.errors import EngineError, ErrorCode
from engine.experts.ram_tier import Acquired
from engine.experts.record import RecordTable
from engine.experts.slot_group import share_slots
from tests.engine.made_up_records import LARGE, SMALL
from tests.engine.ram_tier_parts import CONTENTS, POLICIES, RECORDS, HeldDisk, make_tier


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
        wanted = [expert for expert in experts if expert < CONTENTS.tensors[layer].num_experts]
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
        shares = share_slots(RecordTable(CONTENTS.tensors), max(budget, SMALL.nbytes + LARGE.nbytes), 1)
        for group in self.tier._distinct:
            busy = sum(group is one for one, _, _ in used) + len(group.pool.arriving)
            assert group.pool.capacity == max(shares[group.slots.layout], min(busy, group.pool.capacity))

    @rule(layer=st.integers(0, 2))
    def hold(self, layer: int) -> None:
        count = CONTENTS.tensors[layer].num_experts
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
            self.read_well += CONTENTS.tensors[read.layer].layout.nbytes
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
        assert self.tier.backlog_bytes == sum(CONTENTS.tensors[key // 6].layout.nbytes for key in in_flight)

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "tier"):
            return
        counters = self.tier.counters
        assert counters.hits + counters.late + counters.misses == self.given
        assert counters.kept_bytes + counters.post_fetched_bytes + counters.prefetched_bytes == self.read_well
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
