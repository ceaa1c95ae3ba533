"""Experts that pass through a device in groups: what arrives is computed, whatever is late, cut off or short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CopyRecord, Device
from engine.devices.emulated import open_emulated
from engine.experts.cache.tier import TierCounters
from engine.experts.dispatcher import DECODE_TOKENS
from engine.experts.latency import LatencyModel
from engine.experts.misses import Fetched
from engine.experts.record_source import RecordSource
from engine.experts.vram_cache import Staging
from engine.hardware.profiles import DeviceProfile
from engine.kernels.interface import LayerRecords
from tests.engine.hybrid_layers import EXPERTS, KINDS, LAYERS, Layers, routing
from tests.engine.vram_cache_parts import holding

LINKS = {"slow": 0.02, "fast": 20.0}
MANY = DECODE_TOKENS + 1


@pytest.fixture(scope="module")
def devices() -> Iterator[dict[str, Device]]:
    with (
        open_emulated(DeviceProfile("slow", "for tests", 2**24, LINKS["slow"], 20.0, 1.0)) as slow,
        open_emulated(DeviceProfile("fast", "for tests", 2**24, LINKS["fast"], 20.0, 1.0)) as fast,
    ):
        yield {"slow": slow, "fast": fast}


def brought(device: Device) -> tuple[list[CopyRecord], Any]:
    copies: list[CopyRecord] = []
    return copies, device.copy_log.listen(lambda copy: copies.append(copy) if copy.stream.endswith(" h2d") else None)


@given(
    link=st.sampled_from(sorted(LINKS)),
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slots=st.sampled_from([0, 4]),
    staging=st.integers(1, 14),
    together=st.integers(1, 8),
    mode=st.sampled_from(["fetch", "mixed"]),
    steps=st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.sampled_from([1, 2, MANY, 3 * MANY])), min_size=1, max_size=6
    ),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_prompts_and_tokens_in_any_order(
    devices: dict[str, Device],
    link: str,
    kind: str,
    dtype: torch.dtype,
    slots: int,
    staging: int,
    together: int,
    mode: str,
    steps: list[tuple[int, int]],
    seed: int,
) -> None:
    """No slot is overwritten before it is computed, and every byte on the link is counted once."""
    device, generator = devices[link], torch.Generator().manual_seed(seed)
    copies, stop = brought(device)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            Layers(device, kind, dtype, slots, None, "lru", mode, staging) as of,
        ):
            patch.setattr("engine.experts.misses._FEWEST_TOGETHER", together)
            ring = of.cache.staging
            assert ring is not None
            held = device.memory.use().used
            for layer, tokens in steps:
                of.check(layer, routing(generator, tokens, 3, dtype))
            assert device.memory.use().used <= max(held, device.memory.use().peak)
            assert ring.free == len(ring.segment.slots)
            of.cache.wait()
            device.h2d_stream.synchronize()
            counters, left = of.cache.counters, sum(len(ring.ahead(layer)) for layer in range(LAYERS))
            counted = counters.fetched_bytes + counters.post_fetched_bytes + counters.prefetched_bytes
            assert sum(copy.nbytes for copy in copies) == counted
            assert counters.prefetched == counters.prefetches_used + counters.prefetches_wasted + left
            assert counters.prefill_lookups == (
                counters.prefill_hits + counters.prefill_on_cpu + counters.prefill_fetched
            )
    finally:
        stop()


def groups_of(layers: Layers, number: int) -> list[Any]:
    (fetched,) = [way for way in layers.layers[number]._ways if isinstance(way, Fetched)]
    return fetched._begun


def test_a_group_is_computed_while_the_next_one_arrives(devices: dict[str, Device]) -> None:
    device, generator = devices["fast"], torch.Generator().manual_seed(2)
    with Layers(device, slots=2, staging=4, mode="fetch") as layers:
        copies, stop = brought(device)
        layers.layers[0].after = None
        layers.check(0, routing(generator, MANY, 3))
        stop()
        groups = groups_of(layers, 0)
        assert [[fetch.row for fetch in group.fetches] for group in groups] == [[0, 1], [2, 3], [0, 1]]
        assert len(copies) == EXPERTS
        assert groups[2].fetches[0].copied.started_s >= groups[0].fetches[0].done.ended_s
        assert groups[1].fetches[0].copied.started_s < groups[2].fetches[0].copied.started_s


def test_the_next_layer_comes_while_this_one_is_computed_and_is_copied_once(devices: dict[str, Device]) -> None:
    device, generator = devices["fast"], torch.Generator().manual_seed(2)
    with Layers(device, slots=0, staging=8, mode="fetch") as layers:
        copies, stop = brought(device)
        ring = layers.cache.staging
        assert ring is not None
        layers.check(0, routing(generator, MANY, 3))
        coming = dict(ring.ahead(1))
        assert sorted(coming) == list(range(EXPERTS))
        counters, nbytes = layers.cache.counters, layers.cache.layout.nbytes
        device.h2d_stream.synchronize()
        assert len(copies) == 2 * EXPERTS
        assert (counters.fetched_bytes, counters.prefetched_bytes) == (EXPERTS * nbytes, EXPERTS * nbytes)
        assert (counters.prefetched, counters.prefetches_used) == (EXPERTS, 0)
        layers.check(1, routing(generator, MANY, 3))
        device.h2d_stream.synchronize()
        stop()
        assert len(copies) == 2 * EXPERTS
        assert ring.ahead(1) == {}
        assert (counters.fetched_bytes, counters.prefetched_bytes) == (EXPERTS * nbytes, EXPERTS * nbytes)
        assert (counters.prefetched, counters.prefetches_used, counters.prefetches_wasted) == (EXPERTS, EXPERTS, 0)
        assert counters.prefill_fetched == 2 * EXPERTS
        used = [fetch for group in groups_of(layers, 1) for fetch in group.fetches]
        assert {fetch.expert: fetch.copied for fetch in used} == {e: staged.copied for e, staged in coming.items()}


@pytest.mark.parametrize("tokens", [1, MANY])
def test_what_came_ahead_for_nothing_is_counted_as_wasted(devices: dict[str, Device], tokens: int) -> None:
    """A prompt that is cancelled between two layers leaves experts that nobody needs."""
    device, generator = devices["fast"], torch.Generator().manual_seed(2)
    with Layers(device, slots=0, staging=8, mode="fetch") as layers:
        layers.check(0, routing(generator, MANY, 3))
        for _ in range(4):
            layers.check(0, routing(generator, tokens, 3))
        counters, ring = layers.cache.counters, layers.cache.staging
        assert ring is not None
        assert counters.prefetches_wasted > 0
        assert counters.prefetched == counters.prefetches_wasted + len(ring.ahead(1))
        assert counters.prefetched_bytes == counters.prefetched * layers.cache.layout.nbytes


def test_a_cache_closes_once_what_came_ahead_for_nothing_has_arrived(devices: dict[str, Device]) -> None:
    device = devices["fast"]
    layers = Layers(device, slots=0, staging=8, mode="fetch")
    ring, source = layers.cache.staging, layers.layers[1].source
    assert ring is not None
    holding(device)
    held = source.acquire(range(EXPERTS))
    ring.bring_ahead(1, range(EXPERTS), held)
    held.release()
    coming = list(ring.ahead(1).values())
    layers.close()
    assert all(staged.copied.done() for staged in coming)
    device.synchronize()


def test_a_prompt_that_few_experts_are_enough_for_brings_none_ahead(devices: dict[str, Device]) -> None:
    generator = torch.Generator().manual_seed(2)
    with Layers(devices["fast"], slots=0, staging=8, mode="fetch") as layers:
        hidden, index, weights = routing(generator, MANY, 1)
        layers.check(0, (hidden, index.zero_(), weights))
        assert layers.cache.staging is not None
        assert not layers.cache.staging.ahead(1)


def test_a_kernel_without_memory_gets_smaller_groups_and_then_the_cpu(devices: dict[str, Device]) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes: list[int] = []
    most = 2

    with Layers(devices["fast"], slots=0, staging=12, mode="fetch") as layers:
        ring, first = layers.cache.staging, layers.layers[0]
        assert ring is not None
        plain = layers.kernel(ring.segment.records)

        def kernel(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            sizes.append(len(index.unique()))
            if sizes[-1] > most:
                raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "injected")
            return plain(hidden, index, weights)

        first.make_kernel = lambda _: kernel
        layers.check(0, routing(generator, MANY, 3))
        assert (ring.most_together, max(sizes[-EXPERTS // 2 :])) == (1, 1)
        counters = layers.cache.counters
        assert (counters.prefill_lookups, counters.prefill_fetched, counters.recomputed) == (EXPERTS, EXPERTS, 0)
        most = 0
        layers.check(0, routing(generator, MANY, 3))
        assert (counters.prefill_lookups, counters.recomputed) == (2 * EXPERTS, EXPERTS)


@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_a_link_that_fails_in_the_middle(devices: dict[str, Device], after: int) -> None:
    """Those that did not arrive are computed by the CPU, and nothing of them is taken for what comes next."""
    device, generator = devices["fast"], torch.Generator().manual_seed(2)
    with Layers(device, slots=0, staging=4, mode="fetch") as layers, pytest.MonkeyPatch.context() as patch:
        left, copy = after, device.h2d_stream.copy

        def failing(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                device.h2d_stream.submit(_fail)
            return copy(*args, **options)

        patch.setattr(device.h2d_stream, "copy", failing)
        for layer in (0, 1, 0, 1):
            layers.check(layer, routing(generator, MANY, 3))
        assert layers.cache.counters.recomputed


def _fail() -> None:
    raise RuntimeError("injected")


def test_a_slot_is_not_given_out_while_its_expert_waits(devices: dict[str, Device]) -> None:
    device = devices["fast"]
    torch.manual_seed(1)
    with Layers(device, slots=0, staging=1) as layers:
        bank: LayerRecords = layers.banks[0]
        held = RecordSource(bank, layers.kernel(bank)).acquire(range(EXPERTS))
        counters = TierCounters()
        ring = Staging(device, bank.layout, 3, [0, 1], counters)
        try:
            first = [ring.bring(0, expert, held) for expert in (0, 1)]
            assert (ring.free, [staged.slot for staged in first]) == (1, [0, 1])
            ring.bring_ahead(1, range(EXPERTS), held)
            assert (list(ring.ahead(1)), ring.free, ring.ahead(0)) == ([0], 1, {})
            busy = holding(device, 0)
            ring.used(first[1].slot, busy)
            again = ring.bring(0, 2, held)
            assert again.slot == 1
            assert not again.copied.wait(0.02), "it overtook the computation of the slot's last expert"
            assert ring.ahead(1), "what came ahead gave way though another slot was free"
            last = ring.bring(0, 3, held)
            assert (last.slot, counters.prefetches_wasted, ring.free) == (2, 1, 0)
            busy.wait()
            last.copied.wait()
            records = ring.segment.records.records
            assert [torch.equal(records[slot], bank.records[e]) for slot, e in ((0, 0), (1, 2), (2, 3))] == [True] * 3
        finally:
            device.synchronize()
            ring.segment.release()


def test_groups_grow_with_what_a_launch_costs_against_a_copy() -> None:
    def together(launch_s: float, link: float) -> int:
        model = LatencyModel("test", 1000, 1e-4, 1e-5, max(launch_s, 1e-5), 64, 0.0, 0.0, link, launch_s)
        return model.together(8, 16)

    assert together(0.0, 1e6) == together(1e-5, 1e6) == 8
    assert together(1e-4, 2e8) == 16
    assert 8 < together(3e-6, 1e8 / 2) <= 16 or together(3e-6, 1e8 / 2) == 8
