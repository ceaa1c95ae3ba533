"""What fails on the way is one error or none, nothing stays pinned, and the next step works."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from engine.common.errors import EngineError
from engine.devices.device import Device, Stream
from engine.devices.emulated import open_emulated
from engine.experts.dispatcher import DECODE_TOKENS
from engine.experts.misses import CACHE_OFF, MIXED, modes
from engine.hardware.profiles import DeviceProfile
from tests.engine.hybrid_layers import HIDDEN, Layers, routing


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
