"""One layer's experts on several cards: each computes those that it has, at the same time, and the first adds up.

Every card has a narrower layer, with a cache, staging slots and a link of its own.  The routing is brought to the host
once, for all of them; hidden states go to the other cards and sums come back, 32 bits wide, directly or through the
host.
What a card misses is the host's or its link's, as on one card; the host serves one card's misses after the other's,
once all cards have been given what they can do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.common import clock
from engine.devices.device import Device, Direction, Event, Label, upload
from engine.devices.memory_budget import MemoryCategory, with_room
from engine.experts.activations import Buffer
from engine.experts.dispatcher import BUNDLED_BYTES, DECODE_TOKENS, HybridExperts, Working
from engine.experts.executor import StepObserver
from engine.telemetry import lanes

_log = logging.getLogger(__name__)

TRIED_BYTES = (2**14, 2**20)
"""Of a token's row, and of a short prompt's."""
_TRIES = 3
_LABEL = (lanes.HIDDEN, None, -1, 1)


class Between:
    """The way from one card to another, with a buffer there that every call reuses.  Not thread-safe.

    Attributes:
        direct_s, hosted_s: what `TRIED_BYTES` take each way, in all; 0 before `measure`.
    """

    def __init__(self, source: Device, target: Device) -> None:
        self.source, self.target = source, target
        self.direct_s = self.hosted_s = 0.0
        self._there = Buffer(lambda n: target.memory.allocate(n, MemoryCategory.ACTIVATIONS), target.memory.release)
        self._host = Buffer(source.host_memory.allocate, source.host_memory.release)
        self._read: Event | None = None

    @property
    def is_direct(self) -> bool:
        """Whether what is not on the host yet goes directly."""
        return self.direct_s <= self.hosted_s

    def measure(self) -> None:
        """Times both ways."""
        direct_s = hosted_s = 0.0
        for nbytes in TRIED_BYTES:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.source.torch_device)
            direct_s += min(self._timed(tensor, is_direct=True) for _ in range(_TRIES))
            hosted_s += min(self._timed(tensor, is_direct=False) for _ in range(_TRIES))
        self.direct_s, self.hosted_s = direct_s, hosted_s
        way = "directly" if self.is_direct else "through the host"
        _log.info(
            "rows go from %s to %s %s: %.0f us against %.0f",
            *(self.source.name, self.target.name, way, 1e6 * min(direct_s, hosted_s), 1e6 * max(direct_s, hosted_s)),
        )

    def carry(self, tensor: torch.Tensor, *, landed: torch.Tensor | None = None) -> tuple[torch.Tensor, Event]:
        """The tensor on the target, and the event of its arrival.  It is valid until the next call.

        Args:
            tensor: contiguous, as the source's compute stream leaves it.
            landed: the same on the host, if it is there already and stays until the copy has ended.
        """
        return self._carry(tensor, landed, is_direct=landed is None and self.is_direct)

    def read_until(self, event: Event) -> None:
        """The last result of `carry` may be read until this event."""
        self._read = event

    def forget(self) -> None:
        """After a failure: nothing is in flight any more."""
        self._read = None

    def close(self) -> None:
        """Frees the buffers, which must no longer be in use.  Idempotent."""
        self._there.free()
        self._host.free()

    def _carry(
        self, tensor: torch.Tensor, landed: torch.Tensor | None, *, is_direct: bool
    ) -> tuple[torch.Tensor, Event]:
        source, target = self.source.small_copy_stream, self.target.small_copy_stream
        there = self._room(tensor)
        if self._read is not None:
            target.wait(self._read)
            self._read = None
        if landed is not None:
            return there, target.copy(there, landed, _LABEL, direction=Direction.H2D)
        if self.source.compute_follows_caller:
            computed = self.source.compute_stream.record()
            (target if is_direct else source).wait(computed)
        if is_direct:
            return there, target.copy(there, tensor, _LABEL, direction=Direction.P2P)
        host = self._host.get(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        target.wait(source.copy(host, tensor, _LABEL, direction=Direction.D2H))
        return there, target.copy(there, host, _LABEL, direction=Direction.H2D)

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        needed = tensor.nbytes
        if self._there.nbytes < needed:
            self.target.small_copy_stream.synchronize()
            if self._read is not None:
                self._read.wait()
            self.close()
            roomy = 1 << max(12, (needed - 1).bit_length())
            self._there.get(roomy)
            self._host.get(roomy)
        return self._there.get(needed).view(tensor.dtype).view(tensor.shape)

    def _timed(self, tensor: torch.Tensor, *, is_direct: bool) -> float:
        begun_s = clock.now()
        self._carry(tensor, None, is_direct=is_direct)[1].wait()
        return clock.now() - begun_s


@dataclass(frozen=True)
class Ways:
    """Between the first card and another one, either way; all layers use them in turn."""

    there: Between
    back: Between

    def forget(self) -> None:
        """After a failure."""
        for way in (self.there, self.back):
            way.forget()

    def close(self) -> None:
        """Frees their buffers."""
        for way in (self.there, self.back):
            way.close()


@dataclass(frozen=True)
class Part:
    """A card's part of a layer.

    Attributes:
        own: its experts, by the layer's numbers.
        ways: to the card and back; None for the first.
    """

    experts: HybridExperts
    own: range
    ways: Ways | None


class SharedExperts:
    """An `ExpertKernel` for one layer; see above.

    Args:
        parts: of the cards in order, the first one's first.
        number: of the layer, for the observer.
    """

    records_itself = True

    def __init__(self, parts: Sequence[Part], number: int, observer: StepObserver | None = None) -> None:
        self.parts, self._number, self.observer = tuple(parts), number, observer
        self.num_experts = sum(len(part.own) for part in parts)
        self._home = parts[0].experts
        for part in parts:
            part.experts.is_part, part.experts.first = True, part.own.start

    def number_in_model(self, number: int) -> None:
        for part in self.parts:
            part.experts.number_in_model(number)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`; all three are on the first card.

        Raises:
            EngineError: a card failed, or an expert could not be read.  Nothing stays pinned.
        """
        return self._call(hidden_states, top_k_index, top_k_weights, misses_on_cpu=False)

    def with_misses_on_cpu(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `__call__`, but computes all misses on the CPU and does not change the caches."""
        return self._call(hidden, index, weights, misses_on_cpu=True)

    def _call(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, misses_on_cpu: bool
    ) -> torch.Tensor:
        if not index.numel():
            return torch.zeros_like(hidden)
        under_way: list[tuple[Part, Working]] = []
        try:
            return self._computed(hidden, index, weights, under_way, misses_on_cpu=misses_on_cpu)
        except BaseException:
            for _, step in under_way:
                step.close()
            for part in self.parts:
                if part.ways is not None:
                    part.ways.forget()
            raise

    def _computed(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        under_way: list[tuple[Part, Working]],
        *,
        misses_on_cpu: bool,
    ) -> torch.Tensor:
        hidden = hidden.contiguous()
        tensors = [index, weights, *([hidden] if hidden.nbytes <= BUNDLED_BYTES else [])]
        on_host, shares, *rest = self._home.activations.bundle_to_host(tensors)
        landed = rest[0] if rest else None
        used: list[int] = np.unique(on_host[on_host < self.num_experts].numpy()).tolist()
        # The first one comes last: it computes while the others' sums travel.
        for part in (*self.parts[1:], self.parts[0]):
            if part.ways is not None and not any(expert in part.own for expert in used):
                continue
            experts = part.experts
            mine = on_host - part.own.start
            mine = mine.masked_fill((mine < 0) | (mine >= len(part.own)), len(part.own))
            there, gates = hidden, weights
            if part.ways is not None:
                carry = partial(part.ways.there.carry, hidden, landed=landed)
                there, arrived = with_room(carry, experts.cache.give_back)
                gates = upload(shares.clone(), experts.device.torch_device)
                experts.device.compute_stream.wait(arrived)
            under_way.append((part, experts.part(there, mine, gates, landed, misses_on_cpu=misses_on_cpu)))
        results: list[torch.Tensor | None] = []
        promised_s = 0.0
        for part, step in under_way:
            part.experts.promised_s = promised_s
            results.append(_begun(step))
            promised_s += part.experts.own_s
        if self.observer is not None and len(index) <= DECODE_TOKENS and not misses_on_cpu:
            self.observer.observe(self._number, used, hidden)
        for number, (_, step) in enumerate(under_way):
            if results[number] is None:
                results[number] = _ended(step)
        return self._added(hidden, [(part, result) for (part, _), result in zip(under_way, results, strict=True)])

    def _added(self, hidden: torch.Tensor, parts: Sequence[tuple[Part, torch.Tensor | None]]) -> torch.Tensor:
        came = list[tuple[Ways, torch.Tensor, Event]]()
        for part, result in parts[:-1]:
            assert part.ways is not None
            assert result is not None
            landed, arrived = with_room(partial(part.ways.back.carry, result), self._home.cache.give_back)
            part.ways.there.read_until(part.experts.device.compute_stream.record())
            came.append((part.ways, landed, arrived))
        total = parts[-1][1]
        assert total is not None
        rounded = torch.empty_like(hidden)

        def work() -> None:
            for _, landed, _ in came:
                total.add_(landed)
            rounded.copy_(total)

        joined(self._home.device, came, work, (lanes.FINISH, None, -1, 0))
        return rounded


def joined(
    home: Device, came: Sequence[tuple[Ways, torch.Tensor, Event]], work: Callable[[], None], label: Label | None = None
) -> None:
    """Has the first card do what needs all that came from the others."""
    for _, _, arrived in came:
        home.compute_stream.wait(arrived)
    end = home.compute_stream.submit(work, label)
    for ways, _, _ in came:
        ways.back.read_until(end)
    if not home.compute_follows_caller:
        end.wait()


def _begun(step: Working) -> torch.Tensor | None:
    """Lets a card be given what it can do; what the step returns if that was all."""
    try:
        next(step)
    except StopIteration as end:
        result: torch.Tensor = end.value
        return result
    return None


def _ended(step: Working) -> torch.Tensor:
    while (result := _begun(step)) is None:
        pass
    return result


def parts_of(kernel: Any) -> tuple[HybridExperts, ...]:
    """What computes a layer's experts on cards beside the CPU: one for each card; none if nothing does so."""
    if isinstance(kernel, SharedExperts):
        return tuple(part.experts for part in kernel.parts)
    return (kernel,) if isinstance(kernel, HybridExperts) else ()
