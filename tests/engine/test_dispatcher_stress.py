"""Thousands of random steps among resizes, faults and prefetches: right or one error, and nothing leaks."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import Device
from engine.experts.dispatcher import DECODE_TOKENS
from engine.experts.misses import MIXED, modes
from engine.experts.prediction.target import Place, VramPrefetch
from engine.kernels.reference import reference_experts
from tests.engine.hybrid_layers import EXPERTS, KINDS, LAYERS, Layers, routing
from tests.engine.test_record_source import OnDisk

Answers = list[torch.Tensor | None]


def _fail() -> None:
    raise RuntimeError("injected")


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
