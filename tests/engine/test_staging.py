"""Experts that pass through a device in groups: what arrives is computed, whatever is late, cut off or short."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CopyRecord, Device
from engine.devices.emulated import open_emulated
from engine.experts.dispatcher import DECODE_TOKENS
from engine.hardware.profiles import DeviceProfile
from tests.engine.hybrid_layers import EXPERTS, KINDS, LAYERS, Layers, routing

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
