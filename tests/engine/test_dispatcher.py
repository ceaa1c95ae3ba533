"""Experts on two processors at once against the plain definition: whatever is where, and whatever fails."""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError
from engine.devices.device import Device, Stream
from engine.devices.emulated import open_emulated
from engine.experts import dispatcher, executor
from engine.experts.dispatcher import DECODE_TOKENS
from engine.experts.latency import LatencyModel
from engine.experts.misses import CACHE_OFF, MIXED, modes
from engine.experts.path_choice import CopyPace
from engine.hardware.profiles import DeviceProfile
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
    monkeypatch.setattr(executor, "CALL_ROWS", 4)
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


@pytest.fixture  # of its own for each test: a stream keeps what failed on it until somebody asks
def device() -> Iterator[Device]:
    with open_emulated(DeviceProfile("tiny", "for tests", 2**24, 20.0, 20.0, 1.0)) as device:
        yield device


def _fail() -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("mode", modes())
@pytest.mark.parametrize("which", ["compute", "h2d", "small"])
def test_a_failed_stream_is_one_error_and_the_next_step_works(device: Device, mode: str, which: str) -> None:
    streams: dict[str, Stream] = {
        "compute": device.compute_stream,
        "h2d": device.h2d_stream,
        "small": device.small_copy_stream,
    }
    generator = torch.Generator().manual_seed(4)
    with Layers(device, slots=4, mode=mode) as layers:
        for _ in range(3):
            layers.check(0, routing(generator, 2, 3))
            streams[which].submit(_fail)
            message = "injected" if which == "h2d" else ""  # copies for later may be all that fails, and nobody waits
            try:
                layers.layers[0](*routing(generator, 2, 3))
            except EngineError as error:
                message = error.message
            assert "injected" in message
            layers.check(0, routing(generator, 2, 3))
        assert layers.cache.resize(0) == 0, "something is still pinned"


@pytest.mark.parametrize("tokens", [1, 3, DECODE_TOKENS + 1])
def test_what_a_failed_copy_should_have_brought_is_computed_on_the_cpu(device: Device, tokens: int) -> None:
    generator = torch.Generator().manual_seed(4)
    for mode in ("fetch", MIXED, CACHE_OFF):
        with Layers(device, slots=4, mode=mode) as layers:
            for _ in range(4):
                layers.check(0, routing(generator, tokens, 3))
                layers.cache.wait()  # or the stream would recover before anything is fetched
                device.h2d_stream.submit(_fail)
                layers.check(0, routing(generator, tokens, 3))
                layers.check(1, routing(generator, tokens, 3))
            counters = layers.cache.counters
            assert counters.misses == counters.on_cpu + counters.fetched
            assert counters.prefill_lookups == (
                counters.prefill_hits + counters.prefill_on_cpu + counters.prefill_fetched
            )
            assert counters.recomputed or mode != "fetch"
            assert layers.cache.resize(0) == 0


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("mode", modes())
def test_a_step_of_any_size_has_room_where_a_token_has(device: Device, mode: str) -> None:
    """Whatever the buffers are that another step has left."""
    dice, generator, total = random.Random(mode), torch.Generator().manual_seed(4), device.memory.total
    of_a_token = 2 * 3 * HIDDEN * 4  # its experts' outputs, and those that the CPU computes
    for tokens in (1, 2, 40, 43, 64, 90, 128, 300):
        with Layers(device, slots=dice.randrange(3), mode=mode) as layers:
            layers.check(0, routing(generator, dice.randint(1, 300), 3))
            layers.cache.wait()
            used = device.memory.use().used - layers.cache.nbytes - layers.activations.nbytes
            try:
                device.memory.limit(used + dice.choice([of_a_token, 1500, 8192, dice.randint(of_a_token, 40_000)]))
                layers.check(0, routing(generator, tokens, 3))
                layers.check(1, routing(generator, 1, 3))
                layers.cache.wait()
            finally:
                device.memory.limit(total)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_failed_kernel_is_one_error_and_the_next_step_works(
    device: Device, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    with Layers(device, slots=12, mode="cpu") as layers:
        hidden, _, weights = routing(generator, 1, 2)
        layers.check(0, (hidden, torch.tensor([[0, 1]]), weights))
        layers.cache.wait()

        def broken(*_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            if where == "cpu":
                patch.setattr(layers.layers[0].source, "kernel", broken)
            else:
                patch.setattr(layers.layers[0], "make_kernel", lambda _: broken)  # hits; nothing is fetched
            with pytest.raises(EngineError, match="injected"):
                layers.layers[0](hidden, torch.tensor([[0, 2]]), weights)
        layers.check(0, (hidden, torch.tensor([[0, 2]]), weights))
        assert layers.cache.resize(0) == 0


def test_no_room_for_activations_is_an_error_of_memory(device: Device) -> None:
    generator = torch.Generator().manual_seed(4)
    with Layers(device, slots=2, mode="cpu") as layers:
        total = device.memory.total
        device.memory.limit(0)
        try:
            with pytest.raises(EngineError, match="memory"):
                layers.layers[0](*routing(generator, 1, 2))
        finally:
            device.memory.limit(total)
        layers.check(0, routing(generator, 1, 2))


def _ran(hit_s: float, copy_s: float, tokens: int = 2000, base_s: float = 3e-3) -> tuple[CopyPace, float]:
    """After tokens that took what these prices say, and the copies of each of the last ones."""
    drawn = random.Random(1)
    pace, started, late = CopyPace(1e-4, 1e-4), 0, 0
    for token in range(tokens):
        missed = drawn.randrange(8, 24)
        noise = drawn.gauss(0, 2e-4) + (0.05 if drawn.random() < 0.01 else 0.0)
        pace.observe(base_s + hit_s * missed + copy_s * started + noise, missed, started)
        started = pace.due(32 - missed, 8)
        pace.started(started)
        late += started if token >= tokens // 2 else 0
    return pace, late / (tokens // 2)


def test_prices_are_found_in_the_tokens() -> None:
    pace, copies = _ran(1e-4, 4e-4)
    assert pace.hit_s == pytest.approx(1e-4, rel=0.3)
    assert pace.copy_s == pytest.approx(4e-4, rel=0.3)
    assert 1 < copies < 4


def test_hits_that_gain_nothing_pay_for_hardly_any_copies() -> None:
    _, copies = _ran(0.0, 5e-4)
    assert 0 < copies < 0.5


def test_copies_that_cost_nothing_are_as_many_as_there_may_be() -> None:
    _, copies = _ran(1e-4, 0.0)
    assert copies > 7
