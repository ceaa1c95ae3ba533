"""Experts on two processors at once: as defined, in groups, under stress, whatever is where and whatever fails."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CopyRecord, Device, Stream
from engine.devices.emulated import open_emulated
from engine.experts import dispatcher, executor
from engine.experts.dispatcher import DECODE_TOKENS
from engine.experts.latency import LatencyModel
from engine.experts.misses import CACHE_OFF, MIXED, modes
from engine.experts.path_choice import CopyPace
from engine.experts.prediction.target import Place, VramPrefetch
from engine.hardware.profiles import DeviceProfile
from engine.kernels.reference import reference_experts
from tests.engine.hybrid_layers import EVERY_POLICY, EXPERTS, HIDDEN, KINDS, LAYERS, Layers, routing
from tests.engine.test_record_source import OnDisk
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


Answers = list[torch.Tensor | None]


@contextmanager
def _tiers(device: Device, folder: Path, part: int, dice: random.Random) -> Iterator[Layers | OnDisk]:
    """Some experts: all in RAM, or on disk below, where reads fail now and then."""
    kind, slots = sorted(KINDS)[part % 3], dice.choice([1, 4, 8])
    if part % 2 == 0:
        with Layers(device, kind, slots=slots, ways=dice.choice([None, 2]), seed=part) as layers:
            yield layers
        return
    folder.mkdir(parents=True)
    on_disk = OnDisk(device, folder, kind, dice.choice([2, 4, 8]), slots, MIXED, part)
    read: Any = on_disk.disk.read
    faults = random.Random(part)

    def damaged(layer: int, expert: int, into: torch.Tensor, *, urgent: bool) -> Any:
        if faults.random() < 0.005:
            raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, "injected")
        return read(layer, expert, into, urgent=urgent)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_disk.disk, "read", damaged)
            yield on_disk
            on_disk.cache.wait()
            on_disk.tier.settle()
            assert not on_disk.tier.lent
    finally:
        on_disk.close()


def _disturbances(device: Device, tiers: Layers | OnDisk, dice: random.Random) -> list[tuple[float, Callable[[], Any]]]:
    """(how often, what) may happen between two steps."""
    cache, memory = tiers.cache, device.memory
    total = memory.total
    sources = [layer.source for layer in tiers.layers]
    target = VramPrefetch([[Place(cache, layer, source)] for layer, source in enumerate(sources)])

    def pair() -> tuple[int, int]:
        return dice.randrange(LAYERS), dice.randrange(EXPERTS)

    def prefetch() -> None:
        layer, experts = dice.randrange(LAYERS), [dice.randrange(EXPERTS) for _ in range(3)]
        target.prefetch(layer, experts, [pair() for _ in range(3)])

    def limit() -> None:
        used = memory.use().used
        memory.limit(dice.choice([total, total, max(0, used - dice.randrange(8) * cache.layout.nbytes)]))

    found: list[tuple[float, Callable[[], Any]]] = [
        (0.01, lambda: cache.resize(dice.randrange(LAYERS * EXPERTS + 1))),
        (0.01, lambda: dice.choice(device.streams).submit(_fail)),
        (0.2, prefetch),
        (0.02, limit),
    ]
    if isinstance(tiers, OnDisk):
        tier = tiers.tier
        found.append((0.02, lambda: tier.resize(dice.randrange(1, 9) * cache.layout.nbytes)))
    return found


def _stress(device: Device, folder: Path, steps: int, seed: int) -> Answers:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    total = device.memory.total
    messages: list[str] = []
    answers: Answers = []
    for part in range(4):
        with _tiers(device, folder / str(part), part, dice) as tiers:
            disturbances = _disturbances(device, tiers, dice)
            for _ in range(steps // 4):
                for often, what in disturbances:
                    if dice.random() < often:
                        what()
                number = dice.randrange(LAYERS)
                layer = tiers.layers[number]
                layer.serve_by(dice.choice(modes()))
                tokens = DECODE_TOKENS + 1 if dice.random() < 0.02 else dice.choice([1, 1, 1, 2, 6])
                inputs = routing(generator, tokens, 2)
                try:
                    result = layer(*inputs)
                except EngineError as error:
                    messages.append(error.message)
                    answers.append(None)
                    continue
                wanted = reference_experts(tiers.module, tiers.weights[number], *inputs)
                torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
                answers.append(result)
            device.memory.limit(total)
            device.recover()
            assert tiers.cache.resize(0) == 0, "something is still pinned"
            counters = tiers.cache.counters
            assert counters.lookups == counters.hits + counters.misses
            assert counters.prefetches_used + counters.prefetches_wasted <= counters.prefetched
    assert device.memory.use().used == 0
    assert messages
    assert all("injected" in message or "memory" in message for message in messages)
    assert len(messages) < 0.1 * steps
    return answers


def test_stress_gives_the_same_answers_again(device: Device, tmp_path: Path) -> None:
    """Copies and reads end at other moments each time; what is computed does not depend on that."""
    first, again = (_stress(device, tmp_path / name, 300, 1) for name in ("first", "again"))
    both = [(one, other) for one, other in zip(first, again, strict=True) if one is not None and other is not None]
    assert len(both) > 250
    assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.exhaustive
def test_long_stress(device: Device, tmp_path: Path) -> None:
    _stress(device, tmp_path, 10_000, 2)


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


def test_a_kernel_without_memory_gets_smaller_groups_and_then_the_cpu(devices: dict[str, Device]) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes: list[int] = []
    most = 2

    with Layers(devices["fast"], slots=0, staging=12, mode="fetch") as layers:
        ring, first = layers.cache.staging, layers.layers[0]
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
