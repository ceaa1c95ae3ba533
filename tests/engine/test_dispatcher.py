"""Experts on two processors at once against the plain definition: whatever is where, and whatever fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.devices.cpu import open_cpu
from engine.devices.device import Device, Stream
from engine.devices.emulated import open_emulated
from engine.errors import EngineError
from engine.experts import dispatcher, partial_sums
from engine.experts.activations import Activations
from engine.experts.bank import BankLayer
from engine.experts.cache.policies import POLICY_NAMES
from engine.experts.dispatcher import DECODE_TOKENS, HybridExperts, Misses, StepObserver
from engine.experts.latency import LatencyModel
from engine.experts.record_source import RamRecords
from engine.experts.vram_cache import VramCache
from engine.hardware.profiles import DeviceProfile
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.reference import reference_experts
from tests.engine.test_expert_kernels import Experts, layer_of

LAYERS, EXPERTS, HIDDEN, INNER = 2, 6, 16, 8

KINDS = {
    "gated": Experts(EXPERTS, HIDDEN, INNER, True, False, False, False),
    "like gpt_oss": Experts(EXPERTS, HIDDEN, INNER, True, True, True, False),
    "no gate": Experts(EXPERTS, HIDDEN, INNER, False, False, False, True),
}
_EVERY_POLICY = ["auto", *POLICY_NAMES]
_POPULARITY = {key: float(key % 5) for key in range(LAYERS * EXPERTS)}

# Fetching one miss pays, fetching all does not: a mixture of both.
EVEN = (1e-4, 1e-5, 1e-5, 64, 0.0, 1e-5)


@dataclass
class Layers:
    """A model's experts on one device, layer by layer, with the plain definition beside them."""

    device: Device
    kind: str = "gated"
    dtype: torch.dtype = torch.float32
    slots: int = 4
    ways: int | None = None
    policy: str = "auto"
    mode: Misses = Misses.MIXED
    staging: int = 2
    seed: int = 0
    prefetcher: StepObserver | None = None
    layers: list[HybridExperts] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.module = KINDS[self.kind]
        self.weights = [self.module.weights(self.dtype) for _ in range(LAYERS)]
        self.banks: list[BankLayer] = [layer_of(self.module, weights) for weights in self.weights]
        layout = self.banks[0].layout
        self.cache = VramCache(
            self.device,
            layout,
            layers=LAYERS,
            experts=EXPERTS,
            slots=self.slots,
            ways=self.ways,
            policy=self.policy,
            popularity=_POPULARITY,
            staging=self.staging,
        )
        self.activations = Activations(self.device)
        latency = LatencyModel("test", layout.nbytes, *EVEN, layout.nbytes / 2e-4)
        self.layers = [
            HybridExperts(
                self.cache,
                index,
                RamRecords(bank, self.kernel(bank)),
                self.kernel,
                latency,
                self.activations,
                self.mode,
                self.prefetcher,
            )
            for index, bank in enumerate(self.banks)
        ]

        # What nothing was copied to must not matter.
        for segment in [*self.cache._pools.segments, *([self.cache.staging.segment] if self.cache.staging else [])]:
            segment.records.records.fill_(0xFF)

    def kernel(self, records: LayerRecords) -> ExpertKernel:
        kernel = choose_kernel(self.module, records, None)
        assert kernel is not None
        return kernel

    def close(self) -> None:
        self.activations.close()
        self.cache.close()
        assert self.device.memory.use().used == 0

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, layer: int, routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        result = self.layers[layer](*routing)
        wanted = reference_experts(self.module, self.weights[layer], *routing)
        coarse = self.dtype is torch.bfloat16
        torch.testing.assert_close(result, wanted, rtol=4e-2 if coarse else 1e-4, atol=6e-2 if coarse else 1e-4)
        return result


def routing(
    generator: torch.Generator, tokens: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, distinct experts (or none: an id beyond the last) of each token, and weights."""
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:width] for _ in range(tokens)])
    weights = torch.rand(tokens, width, generator=generator)
    return hidden, index, weights


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with open_emulated(DeviceProfile("tiny", "for tests", 2**24, 20.0, 20.0, 1.0)) as device:
        yield device


@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slots=st.sampled_from([0, 1, 4, LAYERS * EXPERTS]),
    ways=st.sampled_from([None, 2]),
    policy=st.sampled_from(_EVERY_POLICY),
    mode=st.sampled_from(Misses),
    staging=st.sampled_from([0, 1, 3]),
    tokens=st.lists(st.sampled_from([0, 1, 1, 1, 3, 17, DECODE_TOKENS + 1]), min_size=1, max_size=6),
    width=st.integers(1, EXPERTS),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_equals_the_reference(
    device: Device,
    kind: str,
    dtype: torch.dtype,
    slots: int,
    ways: int | None,
    policy: str,
    mode: Misses,
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


@pytest.mark.parametrize("mode", list(Misses))
def test_long_steps_are_cut(device: Device, monkeypatch: pytest.MonkeyPatch, mode: Misses) -> None:
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
    for mode, slots in [(mode, slots) for mode in Misses for slots in (0, 4, 16)]:
        generator = torch.Generator().manual_seed(11)
        with Layers(device, kind, torch.bfloat16, slots=slots, mode=mode) as layers:
            results = [
                layers.check(layer, routing(generator, count, 3, torch.bfloat16))
                for count in (1, 1, 4, 1, 1)
                for layer in range(LAYERS)
            ]
            answers.append(torch.cat(results))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_the_processor_as_the_device() -> None:
    generator = torch.Generator().manual_seed(1)
    with open_cpu(total=2**24) as device:
        for mode in Misses:
            with Layers(device, "like gpt_oss", mode=mode) as layers:
                for count in (1, 1, 7):
                    layers.check(0, routing(generator, count, 2))


def test_misses_are_met_as_the_mode_says(device: Device) -> None:
    one = torch.Generator().manual_seed(5)
    hidden, _, _ = routing(one, 1, 1)
    index, weights = torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4)
    met = {}
    for mode in Misses:
        with Layers(device, slots=12, policy="lru", mode=mode) as layers:
            layers.check(0, (hidden, index, weights))
            layers.cache.wait()
            first = layers.cache.counters
            met[mode] = (first.on_cpu, first.fetched)
            layers.check(0, (hidden, index, weights))
            hits = 0 if mode is Misses.CACHE_OFF else 4
            assert (layers.cache.counters.hits, len(layers.cache.residents(0))) == (hits, hits)
    assert met[Misses.CPU_ONLY] == (4, 0)
    assert met[Misses.FETCH_ONLY] == (0, 4)
    assert met[Misses.CACHE_OFF] == (0, 0)
    assert sum(met[Misses.MIXED]) == 4


def test_a_prefill_leaves_the_cache_alone(device: Device) -> None:
    generator = torch.Generator().manual_seed(2)
    for mode in (Misses.MIXED, Misses.FETCH_ONLY, Misses.CPU_ONLY):
        with Layers(device, slots=12, mode=mode) as layers:
            layers.check(0, routing(generator, DECODE_TOKENS + 1, 3))
            layers.cache.wait()
            assert layers.cache.residents(0) == {}


def _fail() -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("mode", list(Misses))
@pytest.mark.parametrize("which", ["compute", "h2d", "small"])
def test_a_failed_stream_is_one_error_and_the_next_step_works(device: Device, mode: Misses, which: str) -> None:
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


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_failed_kernel_is_one_error_and_the_next_step_works(
    device: Device, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(4)
    with Layers(device, slots=12, mode=Misses.CPU_ONLY) as layers:
        hidden, _, weights = routing(generator, 1, 2)
        layers.check(0, (hidden, torch.tensor([[0, 1]]), weights))
        layers.cache.wait()

        def broken(*_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("injected")

        with monkeypatch.context() as patch:
            if where == "cpu":
                patch.setattr(layers.layers[0]._source, "kernel", broken)
            else:
                patch.setattr(layers.layers[0], "_make_kernel", lambda _: broken)  # hits; nothing is fetched
            with pytest.raises(EngineError, match="injected"):
                layers.layers[0](hidden, torch.tensor([[0, 2]]), weights)
        layers.check(0, (hidden, torch.tensor([[0, 2]]), weights))
        assert layers.cache.resize(0) == 0


def test_no_room_for_activations_is_an_error_of_memory(device: Device) -> None:
    generator = torch.Generator().manual_seed(4)
    with Layers(device, slots=2, mode=Misses.CPU_ONLY) as layers:
        total = device.memory.total
        device.memory.limit(0)
        try:
            with pytest.raises(EngineError, match="memory"):
                layers.layers[0](*routing(generator, 1, 2))
        finally:
            device.memory.limit(total)
        layers.check(0, routing(generator, 1, 2))


def test_a_closed_device_is_an_error() -> None:
    device = open_emulated(DeviceProfile("tiny", "for tests", 2**24, 20.0, 20.0, 1.0))
    with Layers(device) as layers:
        layers.check(0, routing(torch.Generator().manual_seed(4), 1, 2))
        device.close()
        with pytest.raises(EngineError, match="closed"):
            layers.layers[0](*routing(torch.Generator().manual_seed(4), 1, 2))


def test_a_slow_link_holds_nobody_up(device: Device) -> None:
    """While the copy engine is stuck, the CPU computes what is missing, step after step."""
    generator = torch.Generator().manual_seed(6)
    gate = threading.Event()
    with Layers(device, slots=6, mode=Misses.CPU_ONLY) as layers:
        event = device.h2d_stream.submit(gate.wait)
        for _ in range(4):
            for layer in range(LAYERS):
                layers.check(layer, routing(generator, 1, 3))
        assert layers.cache.counters.hits == 0
        gate.set()
        event.wait()
        layers.cache.wait()
        assert layers.cache.counters.post_fetches == 6


def _stress(device: Device, steps: int, seed: int) -> None:
    """Random steps, resizes, failures and cancels; every answer is right or an error, and nothing leaks."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    messages: list[str] = []
    for part in range(4):
        kind = sorted(KINDS)[part % 3]
        with Layers(device, kind, slots=dice.choice([1, 4, 8]), ways=dice.choice([None, 2]), seed=part) as layers:
            for _ in range(steps // 4):
                act = dice.random()
                if act < 0.01:
                    layers.cache.resize(dice.randrange(LAYERS * EXPERTS + 1))
                elif act < 0.03:
                    layers.cache.cancel()
                elif act < 0.04:
                    dice.choice(device.streams[:2]).submit(_fail)
                layer = layers.layers[dice.randrange(LAYERS)]
                layer.mode = dice.choice(list(Misses))
                inputs = routing(generator, dice.choice([1, 1, 1, 2, 6]), 2)
                number = layers.layers.index(layer)
                try:
                    result = layer(*inputs)
                except EngineError as error:
                    messages.append(error.message)
                    continue
                wanted = reference_experts(layers.module, layers.weights[number], *inputs)
                torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
            device.recover()
            assert layers.cache.resize(0) == 0
            counters = layers.cache.counters
            assert counters.lookups == counters.hits + counters.misses
            assert 0 <= counters.misses - counters.on_cpu - counters.fetched <= 12 * len(messages)
    assert messages
    assert all("injected" in message for message in messages)


def test_stress(device: Device) -> None:
    _stress(device, 3000, 1)


@pytest.mark.slow
def test_long_stress(device: Device) -> None:
    _stress(device, 10_000, 2)
