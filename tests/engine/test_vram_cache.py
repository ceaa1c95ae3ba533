"""The expert cache of a device: whose bytes lie where, and which policy decides it, in any order of what happens."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.devices.device import Device, Event
from engine.devices.memory_budget import MemoryCategory
from engine.experts.cache.tier import BUDGET_S, BURST_STEPS, PolicySampler
from engine.experts.prediction.target import Place, VramPrefetch
from engine.experts.record_source import RecordSource
from engine.experts.vram_cache import Lookup, VramCache
from engine.kernels.interface import LayerRecords
from tests.engine.made_up_records import SMALL, contents_of, random_records
from tests.engine.vram_cache_parts import (
    EVERY_POLICY,
    EXPERTS,
    LAYERS,
    POPULARITY,
    RECORD,
    fill,
    holding,
    kept,
    tiny_device,
)


@pytest.fixture(scope="module")
def bank() -> list[LayerRecords]:
    records = random_records(contents_of([(EXPERTS, SMALL)] * LAYERS))
    return [LayerRecords(str(index), SMALL, made) for index, made in enumerate(records)]


@pytest.fixture
def device() -> Iterator[Device]:
    with tiny_device() as device:
        yield device


def test_geometry_covers_the_first_layers(device: Device, bank: list[LayerRecords]) -> None:
    cache = VramCache(device, SMALL, layers=LAYERS, experts=EXPERTS, slots=5, ways=2, policy="lru")
    assert cache.slots == 4
    for layer in range(LAYERS):
        fill(cache, bank, layer, [0, 1])
    assert [sorted(cache.residents(layer)) for layer in range(LAYERS)] == [[0, 1], [0, 1], []]
    fill(cache, bank, 0, [2])
    assert sorted(cache.residents(0)) == [1, 2]
    assert sorted(cache.residents(1)) == [0, 1]
    cache.close()
    assert device.memory.use().used == 0


def test_an_arriving_copy_is_not_a_hit(device: Device, bank: list[LayerRecords]) -> None:
    cache = VramCache(device, SMALL, layers=LAYERS, experts=EXPERTS, slots=1)
    hold = holding(device)
    assert cache.post_fetch(0, [0, 1], kept(bank[0], [0, 1])) == 1
    lookup = cache.acquire(0, [0, 1])
    assert (lookup.hits, lookup.misses, lookup.late) == ({}, [0, 1], {0})
    assert cache.post_fetch(0, [0], kept(bank[0], [0])) == 0
    assert cache.backlog_bytes == RECORD
    hold.wait()
    cache.wait()
    assert cache.acquire(0, [0]).hits == {0: 0}
    assert cache.counters.post_fetched_bytes == RECORD
    cache.close()


def test_where_memory_is_refused_the_cache_is_smaller_and_says_so(bank: list[LayerRecords]) -> None:
    with tiny_device() as device:
        taken = device.memory.allocate(device.memory.free - 5 * RECORD, MemoryCategory.KV)
        cache = VramCache(device, SMALL, layers=LAYERS, experts=EXPERTS, slots=12, staging=2)
        assert cache.slots == 2
        assert "2 of 12 experts" in str(cache.note)
        fill(cache, bank, 0, [0, 1])
        assert sorted(cache.residents(0)) == [0, 1]
        cache.close()
        none = VramCache(device, SMALL, layers=LAYERS, experts=EXPERTS, slots=12, staging=100)
        assert len(none.staging.segment.slots) == 5
        assert none.slots == 0
        none.close()
        device.memory.release(taken)
        assert device.memory.use().used == 0


def test_memory_that_others_take_is_given_back_at_the_next_step(bank: list[LayerRecords]) -> None:
    with tiny_device() as device:
        total = device.memory.total
        cache = VramCache(device, SMALL, layers=LAYERS, experts=EXPERTS, slots=8, staging=2)
        assert not cache.note
        fill(cache, bank, 0, [0, 1, 2, 3])
        fill(cache, bank, 1, [0, 1, 2, 3])
        device.memory.limit(5 * RECORD + 7)
        assert device.memory.excess
        lookup = cache.acquire(0, [0, 1, 2, 3])
        assert (cache.slots, device.memory.excess) == (2, 0)
        assert "memory" in str(cache.note)
        cache.release(lookup)
        device.memory.limit(total)
        assert cache.resize(8) == 8
        cache.close()


@pytest.mark.parametrize("ways", [None, 3])
def test_the_best_policy_is_adopted_from_a_sample(device: Device, ways: int | None) -> None:
    """A loop one expert longer than the cache: the worst there is for LRU, which is where it starts."""
    sampler = PolicySampler(range(8), 24, ways)
    names = set()
    for step in range(4 * BURST_STEPS):
        for layer in range(8):
            names.add(sampler.observe(layer, [layer * 8 + step % 4]))
    assert sampler.adopted not in ("lru", "fifo")
    assert sampler.adopted in names


def test_costly_shadows_are_watched_in_bursts_and_still_decide() -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 100e-6
        return now_s

    sampler = PolicySampler(range(8), 24, 3, clock=clock)
    steps = 60 * BURST_STEPS
    for step in range(steps):
        for layer in range(8):
            sampler.observe(layer, [layer * 8 + step % 4])
    assert sampler.adopted not in ("lru", "fifo")
    watched_s = now_s / 2  # the clock also ticks once between two observations
    assert 0 < watched_s / (steps * 8) < 1.3 * BUDGET_S


def test_steps_that_need_not_be_observed_count_as_observed() -> None:
    """Whoever asks before each step decides as who observes all of them, and is spared most."""
    times_s = [0.0, 0.0]

    def clock_of(which: int) -> Callable[[], float]:
        def clock() -> float:
            times_s[which] += 100e-6
            return times_s[which]

        return clock

    asking, observing = (PolicySampler(range(8), 24, 3, clock=clock_of(which)) for which in range(2))
    spared = 0
    for step in range(40 * BURST_STEPS):
        is_spared = asking.rests()
        spared += is_spared
        for layer in range(8):
            keys = [layer * 8 + step % 4]
            observing.observe(layer, keys)
            if not is_spared:
                asking.observe(layer, keys)
        assert asking.adopted == observing.adopted
    assert times_s[0] == times_s[1]
    assert spared > 30 * BURST_STEPS


class CacheMachine(RuleBasedStateMachine):
    """Any order of lookups, copies, holds of the copy engine, failures and resizes."""

    @initialize(
        slots=st.integers(0, 12), ways=st.sampled_from([None, None, 1, 2, 4]), policy=st.sampled_from(EVERY_POLICY)
    )
    def make(self, slots: int, ways: int | None, policy: str) -> None:
        records = random_records(contents_of([(EXPERTS, SMALL)] * LAYERS))
        self.bank = [LayerRecords(str(index), SMALL, made) for index, made in enumerate(records)]
        self.device = tiny_device()
        self.cache = VramCache(
            self.device,
            SMALL,
            layers=LAYERS,
            experts=EXPERTS,
            slots=slots,
            ways=ways,
            policy=policy,
            popularity=POPULARITY,
            staging=2,
        )
        self.target = VramPrefetch(
            [[Place(self.cache, index, RecordSource(one, lambda h, *_: h))] for index, one in enumerate(self.bank)]
        )
        self.held: list[Event] = []
        self.lookups: list[Lookup] = []
        self.link_bytes = 0

        def count(record: object) -> None:
            self.link_bytes += getattr(record, "nbytes", 0) * (getattr(record, "direction", "") == "h2d")

        self.device.copy_log.listen(count)

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1), max_size=3))
    def acquire(self, layer: int, experts: set[int]) -> None:
        lookup = self.cache.acquire(layer, sorted(experts))
        assert set(lookup.hits) | set(lookup.misses) == experts
        assert not set(lookup.hits) & set(lookup.misses)
        self.lookups.append(lookup)

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lookup = self.lookups.pop(data.draw(st.integers(0, len(self.lookups) - 1)))
        self.cache.release(lookup, self.device.compute_stream.record())

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1), max_size=3))
    def post_fetch(self, layer: int, experts: set[int]) -> None:
        self.cache.post_fetch(layer, sorted(experts), kept(self.bank[layer], sorted(experts)))

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def take_in(self, data: st.DataObject) -> None:
        lookup = data.draw(st.sampled_from(self.lookups))
        for expert in lookup.misses[:1]:
            self.cache.admit(lookup, expert, kept(self.bank[lookup.layer], [expert]))

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.lists(st.integers(0, EXPERTS - 1), max_size=3), data=st.data())
    def prefetch(self, layer: int, experts: list[int], data: st.DataObject) -> None:
        pairs = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))
        self.target.prefetch(layer, experts, data.draw(st.lists(pairs, max_size=4)))

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.sets(st.integers(0, EXPERTS - 1), max_size=3))
    def prefill(self, layer: int, experts: set[int]) -> None:
        self.lookups.append(self.cache.hold(layer, sorted(experts)))

    @precondition(lambda self: not self.held)
    @rule(total=st.integers(0, 20))
    def limit(self, total: int) -> None:
        self.device.memory.limit(total * RECORD)

    # Memory is only given back when what is in flight has ended.
    @precondition(lambda self: not self.held and not self.device.memory.excess)
    @rule()
    def hold(self) -> None:
        self.held.append(holding(self.device))

    @precondition(lambda self: self.held)
    @rule()
    def go_on(self) -> None:
        self.held.pop().wait()

    @rule()
    def fail(self) -> None:
        def work() -> None:
            raise RuntimeError("injected")

        self.device.h2d_stream.submit(work)

    @precondition(lambda self: not self.held)
    @rule(slots=st.integers(0, 14))
    def resize(self, slots: int) -> None:
        self.cache.resize(slots)

    @invariant()
    def whoever_is_there_is_whole(self) -> None:
        """Pinned ones above all: their slot has their bytes, whatever was copied meanwhile."""
        cache, slots = self.cache, []
        for layer in range(LAYERS):
            for expert, slot in cache.residents(layer).items():
                segment, row = cache.locate(slot)
                assert torch.equal(segment.records.records[row], self.bank[layer].records[expert])
                slots.append(slot)
        assert len(slots) == len(set(slots)) <= cache.slots
        for lookup in self.lookups:
            assert lookup.hits.items() <= cache.residents(lookup.layer).items()

    @invariant()
    def memory_is_counted_to_the_byte(self) -> None:
        use = self.device.memory.use().by_category
        assert use[MemoryCategory.EXPERTS] == self.cache.nbytes == self.cache.slots * RECORD
        counters = self.cache.counters
        assert counters.lookups == counters.hits + counters.misses

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        self.cache.wait()
        counters = self.cache.counters
        copied = counters.post_fetched_bytes + counters.prefetched_bytes + counters.kept_bytes
        assert copied == self.link_bytes
        assert counters.prefetches_used + counters.prefetches_wasted <= counters.prefetched
        self.cache.close()
        assert self.device.memory.use().used == 0
        self.device.close()


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase
