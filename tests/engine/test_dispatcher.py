"""Experts on two processors at once against the plain definition: whatever is where, and whatever fails."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.devices.device import Device
from engine.experts import dispatcher, partial_sums
from engine.experts.dispatcher import DECODE_TOKENS
from engine.experts.latency import LatencyModel
from engine.experts.misses import CACHE_OFF, MIXED, modes
from tests.engine.hybrid_layers import EVERY_POLICY, EXPERTS, HIDDEN, KINDS, LAYERS, Layers, routing
from tests.engine.vram_cache_parts import holding


@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slots=st.sampled_from([0, 1, 4, LAYERS * EXPERTS]),
    ways=st.sampled_from([None, 2]),
    policy=st.sampled_from(EVERY_POLICY),
    mode=st.sampled_from(modes()),
    staging=st.sampled_from([0, 1, 3, 8]),
    tokens=st.lists(st.sampled_from([0, 1, 1, 1, 3, 17, DECODE_TOKENS + 1]), min_size=1, max_size=6),
    width=st.integers(1, EXPERTS),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_equals_the_reference(
    device: Device,
    kind: str,
    dtype: torch.dtype,
    slots: int,
    ways: int | None,
    policy: str,
    mode: str,
    staging: int,
    tokens: list[int],
    width: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    with Layers(device, kind, dtype, slots, ways, policy, mode, staging, seed) as layers:
        for count in tokens:
            for layer in range(LAYERS):
                if count:
                    layers.check(layer, routing(generator, count, width, dtype))
                else:
                    empty = routing(generator, 1, width, dtype)
                    assert layers.layers[layer](*(each[:0] for each in empty)).shape == (0, HIDDEN)
        counters = layers.cache.counters
        assert counters.lookups == counters.hits + counters.misses
        assert counters.misses == counters.on_cpu + counters.fetched
        prefilled = counters.prefill_hits + counters.prefill_on_cpu + counters.prefill_fetched
        assert counters.prefill_lookups == prefilled


@pytest.mark.parametrize("mode", modes())
def test_long_steps_are_cut(device: Device, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(dispatcher, "STEP_ELEMENTS", 7 * 3 * HIDDEN)
    monkeypatch.setattr(partial_sums, "CALL_ROWS", 4)
    generator = torch.Generator().manual_seed(3)
    for kind in KINDS:
        with Layers(device, kind, mode=mode) as layers:
            for count in (2, 1, 5, 40, 100):
                layers.check(0, routing(generator, count, 3))
            assert layers.activations.rows((1,), torch.uint8).untyped_storage().nbytes() < 3 * 4096


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_answer_does_not_depend_on_what_is_where(device: Device, kind: str) -> None:
    """To the bit: on one machine the same seed gives the same text, however full the cache and however timed."""
    answers = []
    for mode, slots in [(mode, slots) for mode in modes() for slots in (0, 4, 16)]:
        generator = torch.Generator().manual_seed(11)
        with Layers(device, kind, torch.bfloat16, slots=slots, mode=mode) as layers:
            results = [
                layers.check(layer, routing(generator, count, 3, torch.bfloat16))
                for count in (1, 1, 4, 1, 1)
                for layer in range(LAYERS)
            ]
            answers.append(torch.cat(results))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_misses_are_met_as_the_mode_says(device: Device) -> None:
    one = torch.Generator().manual_seed(5)
    hidden, _, _ = routing(one, 1, 1)
    index, weights = torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4)
    met = {}
    for mode in modes():
        with Layers(device, slots=12, policy="lru", mode=mode) as layers:
            layers.check(0, (hidden, index, weights))
            layers.cache.wait()
            first = layers.cache.counters
            met[mode] = (first.on_cpu, first.fetched)
            layers.check(0, (hidden, index, weights))
            hits = 0 if mode == CACHE_OFF else 4
            assert (layers.cache.counters.hits, len(layers.cache.residents(0))) == (hits, hits)
    assert met["cpu"] == (4, 0)
    assert met["fetch"] == (0, 4)
    assert met[CACHE_OFF] == (0, 0)
    assert sum(met[MIXED]) == 4


def test_hits_are_computed_by_the_cpu_where_that_is_done_sooner(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatencyModel, "sides", lambda *_sides: {True: 1.0})
    generator = torch.Generator().manual_seed(9)
    with Layers(device, slots=12, policy="lru") as layers:
        for count in (1, 1, 3, 1):
            layers.check(0, routing(generator, count, 3))
            layers.cache.wait()
        counters = layers.cache.counters
        assert 0 < counters.hits == counters.hits_on_cpu
        assert counters.misses == counters.on_cpu + counters.fetched
        assert len(layers.cache.residents(0)) >= 4  # what misses is sent for all the same


@pytest.mark.parametrize("mode", modes())
def test_a_prefill_leaves_the_cache_alone(device: Device, mode: str) -> None:
    generator = torch.Generator().manual_seed(2)
    with Layers(device, slots=6, policy="lru", mode=mode) as layers:
        cache = layers.cache
        for count in (1, 1, 1, 2):
            for layer in range(LAYERS):
                layers.check(layer, routing(generator, count, 3))
            cache.wait()
        residents = [cache.residents(layer) for layer in range(LAYERS)]
        order = list(cache._tier.pool_of[0].policy.victims())
        before = replace(cache.counters)
        for layer in range(LAYERS):
            layers.check(layer, routing(generator, DECODE_TOKENS + 1, 3))
            layers.check(layer, routing(generator, 10 * DECODE_TOKENS, 3))
        cache.wait()
        assert [cache.residents(layer) for layer in range(LAYERS)] == residents
        assert list(cache._tier.pool_of[0].policy.victims()) == order
        after = cache.counters
        assert after.prefill_lookups == (0 if mode == CACHE_OFF else 4 * EXPERTS)
        assert after.prefill_hits == sum(2 * len(there) for there in residents)
        changed = {name for name, value in asdict(after).items() if value != getattr(before, name)}
        served = {"prefill_lookups", "prefill_hits", "prefill_on_cpu", "prefill_fetched", "fetched_bytes"}
        assert changed <= served | {"prefetched", "prefetches_used", "prefetches_wasted", "prefetched_bytes"}


def test_a_slow_link_holds_nobody_up(device: Device) -> None:
    """While the copy engine is stuck, the CPU computes what is missing, step after step."""
    generator = torch.Generator().manual_seed(6)
    with Layers(device, slots=6, mode="cpu") as layers:
        event = holding(device)
        for _ in range(4):
            for layer in range(LAYERS):
                layers.check(layer, routing(generator, 1, 3))
        assert layers.cache.counters.hits == 0
        assert not event.done()
        event.wait()
        layers.cache.wait()
        assert layers.cache.counters.post_fetches == 6
