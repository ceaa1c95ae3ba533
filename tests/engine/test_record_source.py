"""Records in RAM, all or some: what is held is there, and what a copy still reads is given to nobody else."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import Device, Event
from engine.devices.emulated import open_emulated
from engine.devices.memory_budget import MemoryCategory
from engine.experts.activations import Activations
from engine.experts.container import ContainerWriter, Contents
from engine.experts.dispatcher import DECODE_TOKENS, HybridExperts
from engine.experts.latency import LatencyModel
from engine.experts.misses import MIXED, modes
from engine.experts.prediction.target import Place, VramPrefetch
from engine.experts.ram_tier import RamTier
from engine.experts.record import LayerSpec
from engine.experts.record_source import Arrivals, Held
from engine.experts.vram_cache import VramCache
from engine.hardware.profiles import DeviceProfile
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.reference import reference_experts
from tests.engine.hybrid_layers import EVEN, EXPERTS, KINDS, LAYERS, routing
from tests.engine.made_up_records import LARGE, SMALL, disk_of
from tests.engine.ram_tier_parts import RECORDS, HeldDisk, make_tier
from tests.engine.test_expert_kernels import layer_of
from tests.engine.vram_cache_parts import holding


@dataclass
class _Copy:
    """A record on its way out of a slot."""

    layer: int
    expert: int
    source: torch.Tensor
    target: torch.Tensor
    event: Event


def _no_kernel(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    return hidden_states


class SourceMachine(RuleBasedStateMachine):
    """Any order of holding, copying and releasing, of reads and copies that end well or fail."""

    LAYERS = (0, 2)  # they share their slots

    @initialize(policy=st.sampled_from(("lru", "lfu", "random", "auto")))
    def begin(self, policy: str) -> None:
        self.disk = HeldDisk()
        self.tier = make_tier(self.disk, policy=policy)
        self.sources = {layer: self.tier.source(layer, _no_kernel) for layer in self.LAYERS}
        self.device = open_emulated(DeviceProfile("tiny", "for tests", 2**21, 50.0, 50.0, 0.0))
        self.held: list[tuple[int, Held]] = []
        self.copies: list[_Copy] = []
        self.hold: Event | None = None

    @rule(layer=st.sampled_from(LAYERS), experts=st.sets(st.integers(0, 5), min_size=1, max_size=4))
    def acquire(self, layer: int, experts: set[int]) -> None:
        # It never waits: in this machine reads end when they are told to.
        held = self.sources[layer].acquire(sorted(experts), waits=False)
        assert set(held.rows) | set(held.left) == experts
        self.held.append((layer, held))

    @rule(layer=st.sampled_from(LAYERS), experts=st.sets(st.integers(0, 5), min_size=1, max_size=4))
    def hold_present(self, layer: int, experts: set[int]) -> None:
        held = self.sources[layer].hold_present(sorted(experts))
        assert set(held.rows) <= experts
        assert not held.arriving
        self.held.append((layer, held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        layer, held = data.draw(st.sampled_from(self.held))
        for expert in held.rows:
            arrival = held.arriving.get(expert)
            if arrival is not None and (not arrival.done() or arrival.exception() is not None):
                continue
            target = self.device.memory.allocate(SMALL.nbytes, MemoryCategory.STAGING)
            source = held.record(expert)
            event = self.device.h2d_stream.copy(target, source)
            held.until(expert, event)
            self.copies.append(_Copy(layer, expert, source, target, event))
        if self.hold is None:  # copies end when they are told to, or at once: what comes next depends on it
            self.device.h2d_stream.record().wait()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        some = data.draw(st.sets(st.sampled_from(sorted(held.rows)))) if held.rows else set()
        held.release(some)
        held.release()
        held.release()

    @rule(layer=st.sampled_from(LAYERS), expert=st.integers(0, 5), dead=st.sets(st.integers(0, 5), max_size=3))
    def prefetch(self, layer: int, expert: int, dead: set[int]) -> None:
        self.sources[layer].prefetch([expert], [(layer, one) for one in dead])

    @rule(small=st.integers(0, 14), large=st.integers(0, 4))
    def resize(self, small: int, large: int) -> None:
        now = self.tier.resize(small * SMALL.nbytes + large * LARGE.nbytes)
        assert now == self.tier.nbytes
        assert self.tier.filled_nbytes <= now

    @precondition(lambda self: self.disk.waiting)
    @rule(data=st.data(), fails=st.booleans())
    def end_read(self, data: st.DataObject, fails: bool) -> None:
        read = data.draw(st.sampled_from(self.disk.waiting))
        self.disk.end(read, OSError("injected") if fails else None)

    @precondition(lambda self: self.hold is None)
    @rule()
    def hold_the_link(self) -> None:
        self.hold = holding(self.device)

    @precondition(lambda self: self.hold is not None)
    @rule()
    def let_go(self) -> None:
        self.hold = None
        self.device.h2d_stream.record().wait()

    @precondition(lambda self: self.hold is None)
    @rule()
    def wait_for_copies(self) -> None:
        before = len(self.tier.lent)
        assert self.sources[0].wait_for_copies() == bool(before)
        assert len(self.tier.lent) < max(before, 1)

    @invariant()
    def what_is_held_or_read_is_itself(self) -> None:
        for layer, held in self.held:
            for expert in held.rows:
                arrival = held.arriving.get(expert)
                if arrival is None or (arrival.done() and arrival.exception() is None):
                    assert torch.equal(held.record(expert), RECORDS[layer][expert])
        for copy in self.copies:
            done = copy.event.done()
            if not done:
                assert torch.equal(copy.source, RECORDS[copy.layer][copy.expert])
            elif copy.event.failure is None:
                assert torch.equal(copy.target, RECORDS[copy.layer][copy.expert])

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for _, held in self.held:
            held.release()
        while self.tier.wait_for_copies():
            pass
        for read in list(self.disk.waiting):
            self.disk.end(read)
        # Nothing is pinned any more: every slot can be had.
        for layer in self.LAYERS:
            room = self.tier.capacity(layer)
            assert len(self.sources[layer].acquire(range(6), waits=False).rows) == min(room, 6)
            break
        for read in list(self.disk.waiting):
            self.disk.end(read)
        self.tier.close()
        self.device.close()


SourceMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestSourceMachine = SourceMachine.TestCase


@given(
    slots=st.integers(1, 7),
    present=st.sets(st.integers(0, 5)),
    wanted=st.lists(st.integers(0, 5), unique=True),
    at_once=st.integers(1, 3),
    fails=st.none() | st.integers(0, 5),
)
@settings(deadline=None)
def test_experts_come_once_each_and_are_let_go(
    slots: int, present: set[int], wanted: list[int], at_once: int, fails: int | None
) -> None:
    """Those in RAM first, and no more at a time than there are slots; whatever fails, nothing stays held."""
    disk = HeldDisk()
    tier = make_tier(disk, slots * SMALL.nbytes + LARGE.nbytes, at_least=1)
    source = tier.source(0, _no_kernel)
    there = sorted(present)[: tier.capacity(0)]
    before = tier.acquire(0, there)
    for read in list(disk.waiting):
        disk.end(read)
    before.release()

    def read_some() -> None:
        for read in list(disk.waiting[:at_once]):
            damaged = EngineError(ErrorCode.CHECKPOINT_DAMAGED, "torn") if read.expert == fails else None
            disk.end(read, damaged)

    arrivals = Arrivals(source, wanted, read_some)
    came: list[int] = []
    try:
        for held, experts in arrivals:
            assert experts
            for expert in experts:
                assert torch.equal(held.record(expert), RECORDS[0][expert])
            came += experts
    except EngineError:
        assert fails in wanted
        arrivals.release()
    else:
        assert sorted(came) == sorted(wanted)
        assert not arrivals.left
        first = [expert for expert in wanted if expert in there]
        assert came[: len(first)] == first
        assert not set(arrivals.read) & set(first)
    for read in list(disk.waiting):
        disk.end(read)
    assert not any(group.pool._pins for group in tier._groups.values())
    tier.close()


class OnDisk:
    """A model's experts on disk, through so many RAM slots and VRAM slots."""

    def __init__(self, device: Device, folder: Path, kind: str, ram: int, slots: int, mode: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = KINDS[kind]
        self.weights = [self.module.weights(torch.float32) for _ in range(LAYERS)]
        banks = [layer_of(self.module, weights) for weights in self.weights]
        layout = banks[0].layout
        specs = tuple(LayerSpec(f"layers.{index}", EXPERTS, layout) for index in range(LAYERS))
        contents = Contents("made up", "fp32", {"files": [["made.up", 1, 2]], "content": "00"}, specs)
        path = folder / "records.gguf"
        with ContainerWriter(path, contents, direct=False) as writer:
            for layer, bank in enumerate(banks):
                writer.write(layer, bank.records, lambda count: None)
            writer.finish()
        self.disk = disk_of(path, contents, direct=False, readers=2)
        self.tier = RamTier(self.disk, ram * layout.nbytes, at_least=1)
        self.cache = VramCache(device, layout, layers=LAYERS, experts=EXPERTS, slots=slots, staging=2)
        self.activations = Activations(device)
        latency = LatencyModel("test", layout.nbytes, *EVEN, layout.nbytes / 2e-4)
        self.sources = [self.tier.source(layer, self.kernel(self.tier.slots(layer))) for layer in range(LAYERS)]
        self.layers = [
            HybridExperts(self.cache, layer, source, self.kernel, latency, self.activations, mode)
            for layer, source in enumerate(self.sources)
        ]

    def kernel(self, records: LayerRecords) -> ExpertKernel:
        kernel = choose_kernel(self.module, records, None)
        assert kernel is not None
        return kernel

    def check(self, layer: int, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        wanted = reference_experts(self.module, self.weights[layer], *inputs)
        torch.testing.assert_close(self.layers[layer](*inputs), wanted, rtol=1e-4, atol=1e-4)

    def close(self) -> None:
        self.cache.close()
        self.activations.close()
        self.tier.close()


@given(
    kind=st.sampled_from(sorted(KINDS)),
    ram=st.integers(1, 7),
    slots=st.sampled_from([0, 2, 6]),
    mode=st.sampled_from(modes()),
    tokens=st.lists(st.sampled_from([1, 1, 1, 3, DECODE_TOKENS + 1]), min_size=1, max_size=6),
    width=st.integers(1, EXPERTS),
    seed=st.integers(0, 10**6),
)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_three_tiers_equal_the_reference(
    device: Device,
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    ram: int,
    slots: int,
    mode: str,
    tokens: list[int],
    width: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    with closing(OnDisk(device, tmp_path_factory.mktemp("bank"), kind, ram, slots, mode, seed)) as tiers:
        target = VramPrefetch([[Place(tiers.cache, layer, source)] for layer, source in enumerate(tiers.sources)])
        for count in tokens:
            for layer in range(LAYERS):
                tiers.check(layer, routing(generator, count, width))
                target.prefetch((layer + 1) % LAYERS, [seed % EXPERTS, 1], [(layer, 0), (layer, 1)])
        tiers.cache.wait()
        tiers.tier.settle()
        assert not tiers.tier.lent
        counters = tiers.cache.counters
        assert counters.misses == counters.on_cpu + counters.fetched


def test_a_damaged_record_is_one_error_and_nothing_stays_held(device: Device, tmp_path: Path) -> None:
    with closing(OnDisk(device, tmp_path, "gated", 4, 8, MIXED, 1)) as tiers:
        generator = torch.Generator().manual_seed(1)
        read: Any = tiers.disk.read
        with pytest.MonkeyPatch.context() as patch:

            def damaged(layer: int, expert: int, into: torch.Tensor, *, urgent: bool) -> Any:
                if expert == 2:
                    raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, "injected")
                return read(layer, expert, into, urgent=urgent)

            patch.setattr(tiers.disk, "read", damaged)
            hidden, _, weights = routing(generator, 1, 3)
            with pytest.raises(EngineError, match="injected"):
                tiers.layers[0](hidden, torch.tensor([[0, 2, 1]]), weights)
        tiers.check(0, (hidden, torch.tensor([[0, 2, 1]]), weights))
        tiers.cache.wait()
        tiers.tier.settle()
        held = tiers.sources[1].acquire([0, 1, 2, 3])
        assert len(held.rows) == 4
        held.release()
