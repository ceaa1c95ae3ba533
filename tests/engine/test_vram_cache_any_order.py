"""The expert cache of a device in any order of lookups, copies, failures, cancels and resizes."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.devices.device import Event
from engine.devices.memory_budget import MemoryCategory
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
    holding,
    kept,
    tiny_device,
)


class CacheMachine(RuleBasedStateMachine):
    """Any order of lookups, copies, holds of the copy engine, failures, cancels and resizes."""

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
            [Place(self.cache, index, RecordSource(one, lambda h, *_: h)) for index, one in enumerate(self.bank)]
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

    @rule()
    def cancel(self) -> None:
        self.cache.cancel()

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
