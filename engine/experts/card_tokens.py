"""Tokens that a device computes by itself, from the look-up of experts to the sum of their outputs.

The dispatcher stands between a layer's routing and its experts; here it stands between two tokens.  While one runs, the
device finds its experts in a table of slots, and a native thread computes those it misses.  Afterwards what happened is
read from the token's records: policies learn from it, misses are copied to slots, and the table changes for the next
token.  That may be a few rows which are computed together: of several sequences, or guesses of one.  A real card tries
them with the model's own experts before they are used.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.common import clock
from engine.experts.cache.policies import Key
from engine.experts.dispatcher import HybridExperts
from engine.experts.executor import record_uses
from engine.experts.misses import MIXED
from engine.experts.path_choice import CopyPace, PathChoice
from engine.experts.vram_cache import VramCache
from engine.formats.tiles import RecordLayout
from engine.kernels.cuda.driver import NvidiaCard
from engine.kernels.cuda.exchange import LIMIT_NS, CardTimes, CudaExchange
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.native.exchange import MISSED, MOST_CHOSEN, MOST_VISITS, NativeExchange
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.structs import CardExpertsStruct, ExpertsStruct
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

_log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""After so long the card is asked whether it is still there."""
_OFFERED = 16
"""Misses of a token that are offered to policies, which may all refuse."""
_PRICED_EVERY = 32
"""Tokens after which policies are told again what a copy costs."""
_LONGEST_REST = 15
"""The most tokens in a row after which policies are offered nothing, where they have refused everything before."""
_FILLING = 0.25
"""Part of the time that copies may take while slots are empty."""


@dataclass
class _CacheOfTokens:
    """A cache, and where its slots are.

    Attributes:
        layers: number in the exchange of each of its layers.
        cards: of these, for the kernels.
        first: [layers, 1] the key of each one's first expert.
    """

    cache: VramCache
    layers: dict[int, int] = field(default_factory=dict)
    first: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 1), np.int64))
    cards: list[CardExpertsStruct] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    slots: ctypes.Array[ctypes.c_void_p] | None = None

    def locate(self) -> bool:
        """Tells the kernels where the slots are; whether that has changed."""
        addresses = self.cache.slot_addresses
        if self.slots is not None and addresses is self.addresses:
            return False
        self.addresses, self.slots = addresses, (ctypes.c_void_p * len(addresses))(*addresses)
        for card in self.cards:
            card.slots = ctypes.addressof(self.slots)
        return True


class TokenObserver(Protocol):
    """As `engine.experts.executor.StepObserver`, for whole tokens."""

    def observe_all(self, experts: NDArray[np.int64]) -> None:
        """A token has used these, [layers, n]."""


class TokenTime(Protocol):
    """Of a card whose time is modelled."""

    def stopped(self) -> AbstractContextManager[None]:
        """Within, the clock stands still: what runs is charged afterwards."""

    def charge(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """For a token with these records, which are returned with moments of this time."""


class CardTokens:
    """The experts of all layers on one device, for steps of a token, or of a few rows.

    Args:
        layers: all that the model has on the device; `can_run` says whether they will do.
        kernels: compute missed experts, as many threads as these have.
        per_token: experts that a row chooses.
        card: runs the kernels of a real card, which stand in a captured step; `None`: the device is emulated, and the
            native kernels of a token run on the caller's thread.

    Attributes:
        is_open: whether a token is under way.
        most_rows: of a token.
        pace: of copies.
        choice: which tokens are the device's own; `None`: all.
        observer: is told of each token.
        slots_known: the same object as long as captured kernels find the slots.
        can_run_more: whether tokens can still be run.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`.
        DriverError, MemoryError: the card cannot share memory with the host.
    """

    def __init__(
        self,
        layers: Sequence[HybridExperts],
        kernels: NativeKernels,
        per_token: int,
        card: NvidiaCard | None = None,
    ) -> None:
        self.is_open, self._per_token = False, per_token
        self._layers, self._device, self._host_memory = list(layers), layers[0].device, layers[0].device.host_memory
        self.slots_known: object = None
        self.can_run_more = True
        structs = [_native(layer) for layer in layers]
        experts, self.most_rows = max(struct.count for struct in structs), min(MAX_TOKENS, MOST_VISITS // per_token)
        self._exchange = NativeExchange(kernels, structs, experts, per_token, self.most_rows, self._host_memory.share)
        self._times = CardTimes()
        try:
            self._card = CudaExchange(card, self._exchange, self._device.torch_device, LIMIT_NS) if card else None
        except BaseException:
            self._release()
            raise
        self._caches: dict[int, _CacheOfTokens] = {}
        self._cards = [CardExpertsStruct(self._exchange.address, None, number) for number in range(len(layers))]
        for number, (layer, struct) in enumerate(zip(layers, self._cards, strict=True)):
            of_tokens = self._caches.setdefault(id(layer.cache), _CacheOfTokens(layer.cache))
            of_tokens.layers[layer.layer] = number
            of_tokens.cards.append(struct)
            layer.tokens = self
        for of_tokens in self._caches.values():
            keys = [of_tokens.cache.key_of(layer, 0) for layer in of_tokens.layers]
            of_tokens.first = np.array(keys)[:, None]
            with of_tokens.cache.unchanged():
                for index in of_tokens.layers:
                    first = of_tokens.cache.key_of(index, 0)
                    residents = of_tokens.cache.residents(index).items()
                    self._change(of_tokens, {first + expert: slot for expert, slot in residents})
        self.observer: TokenObserver | None = None
        self._time: TokenTime | None = None
        self._first = self._hits = self._started = self._rest = self._resting = 0
        self._copying_s = 0.0
        latency = layers[0].latency
        hit_s = latency.hits_s([1, 1]) - latency.hits_s([1])
        self.pace = CopyPace(max(latency.cpu_s(1) - hit_s, 0.0), latency.cpu_s(1))
        self.choice = choice_for(layers, per_token) if any(layer.mode == MIXED for layer in layers) else None

    @staticmethod
    def can_run(layers: Sequence[HybridExperts], per_token: int, card: NvidiaCard | None = None) -> bool:
        """Whether the native kernels compute all of these from RAM, and they or those of the card from slots."""
        return (
            bool(layers)
            and per_token <= MOST_CHOSEN
            and all(
                layer.source.has_all
                and isinstance(getattr(layer.source.kernel, "native", None), NativeExperts)
                and (layer.device.torch_device.type == "cpu" if card is None else _finds_slots(layer))
                for layer in layers
            )
        )

    @property
    def layouts(self) -> list[RecordLayout]:
        """Of each layer's records."""
        return [layer.cache.layout for layer in self._layers]

    def experts_of(self, layer: HybridExperts) -> tuple[ExpertsStruct, CardExpertsStruct]:
        """What the kernels are told of a layer: its experts in RAM, and how they are found on the device."""
        return _native(layer), self._cards[self._layers.index(layer)]

    @contextmanager
    def token(self) -> Iterator[None]:
        """Within, the kernels may compute layers of a token, of up to `most_rows`.

        Raises:
            OverdueError: missed experts were not computed in time; nothing was learnt, and it may be tried again.
            EngineError: they could not be computed, or the card is gone.
        """
        with ExitStack() as unchanged:
            begun_s = clock.now()
            with self._run(unchanged) as number:
                yield
            missed = self._learn(number, begun_s)
        begun_s = clock.now()
        self._post_fetch(missed)
        self._copying_s = clock.now() - begun_s  # what these copies cost comes with the next token

    @property
    def takes_next(self) -> bool:
        """Whether the next token had better be one of these than the dispatcher's."""
        return self.choice is None or self.choice.by_itself

    @contextmanager
    def dispatched(self) -> Iterator[None]:
        """Within, the dispatcher computes a single row: what it takes is compared with what one of these takes."""
        caches = [of_tokens.cache.counters for of_tokens in self._caches.values()]
        begun_s, missed = clock.now(), sum(counters.misses for counters in caches)
        yield
        if self.choice is not None:
            self.choice.observe(clock.now() - begun_s, sum(counters.misses for counters in caches) - missed)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """As `token`, but nobody learns from it."""
        with ExitStack() as unchanged, self._run(unchanged):
            yield

    @contextmanager
    def _run(self, unchanged: ExitStack) -> Iterator[int]:
        """A token with what is in the slots now, which stays until `unchanged` is left: its number."""
        for of_tokens in self._caches.values():
            self._change(of_tokens, unchanged.enter_context(of_tokens.cache.unchanged()))
            if of_tokens.locate():
                self.slots_known = object()
        with self._time.stopped() if self._time is not None else nullcontext():
            number = self._exchange.start()
            self.is_open = True
            try:
                yield number
            finally:
                self.is_open = False
                self._end()

    @property
    def hidden(self) -> int:
        """Width of a token's states."""
        return int(self._exchange.shape.hidden)

    @property
    def is_captured(self) -> bool:
        """Whether tokens are captured steps of a real card; otherwise the native kernels compute them."""
        return self._card is not None

    def whole(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`forward`, a step within `token`, as a captured step of the card has to begin and end."""
        assert self._card is not None
        self._card.begin()
        result = forward()
        self._card.finish()
        return result

    def compute(
        self, layer: HybridExperts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Within `whole`: launches what the card does of a layer for [R, H]; see `ExpertKernel`."""
        assert self._card is not None
        number, ids = self._layers.index(layer), index.reshape(-1).long()
        x, shares = hidden.to(torch.bfloat16).contiguous(), weights.reshape(-1).float().contiguous()
        self._card.post(number, ids, x)
        kernel = _card_kernel(layer)
        outputs = kernel.in_slots(x, ids, self._card.slot_of(number)) if kernel is not None else None
        return self._card.join(number, ids, shares, outputs, x).to(hidden.dtype)

    def records(self) -> NDArray[np.void]:
        """[layers] of `CARD_LAYER`: the last token's, which has ended, with times by the engine's clock."""
        records = self._exchange.records()
        if self.is_captured:
            return self._times.on_host(records)
        if clock.own is not None:
            records, later_ns = records.copy(), clock.now_ns() - perf_counter_ns()
            for name in ("begun_ns", "posted_ns", "computed_ns", "joined_ns", "taken_ns", "answered_ns"):
                records[name] += later_ns
        return records

    def give_up(self, why: str) -> None:
        """From now on the dispatcher computes all tokens."""
        _log.warning("%s runs no tokens by itself any more: %s", self._device.name, why)
        self.can_run_more = False
        for layer in self._layers:
            layer.tokens = None

    def take_time(self, time: TokenTime) -> None:
        """Tokens take the time that this says from now on."""
        self._time = time
        self._exchange.compute_in_turn()

    def close(self) -> None:
        """Ends the thread.  Idempotent."""
        self.can_run_more = False
        for layer in self._layers:
            layer.tokens = None
        if self._layers:
            self._release()
        self._layers = []

    def _release(self) -> None:
        self._exchange.close()
        self._host_memory.release(self._exchange.memory)

    def _end(self) -> None:
        """Waits until a token has ended, even where something went wrong before its last kernel was launched."""
        if self._card is None:
            self._exchange.end()
            return
        last = self._device.compute_stream.record()
        last.done()  # Windows passes work on to a card when somebody asks for it
        if self._exchange.wait(_LOOK_S):
            return
        self._ask(last.wait)
        while not self._exchange.wait(_LOOK_S):
            self._ask(self._finish_alone)

    def _finish_alone(self) -> None:
        assert self._card is not None
        self._card.begin()
        self._card.finish()
        self._device.compute_stream.synchronize()  # before a next token: `begin` would take it for its own

    def _ask(self, card: Callable[[], object]) -> None:
        """Once a card does not answer, its flags say nothing any more."""
        try:
            card()
        except Exception as error:
            self.give_up(str(error))
            raise

    def _change(self, of_tokens: _CacheOfTokens, moved: dict[Key, int | None]) -> None:
        experts = of_tokens.cache.experts
        for key, slot in moved.items():
            layer, expert = divmod(key, experts)
            if layer in of_tokens.layers:
                self._exchange.change(of_tokens.layers[layer], expert, slot)

    def _learn(self, token: int, begun_s: float) -> list[NDArray[np.int64]]:
        """Policies, counters and prices learn what the token used; what each layer missed."""
        records = self.records() if RECORDER.on else self._exchange.records()
        if (records["token"] != token).any():
            return []  # it has ended before all layers were computed
        if self._time is not None:
            records = self._time.charge(records)
        token_s = clock.now() - begun_s + self._copying_s
        rows, visits = int(records["rows"][0]), int(records["rows"][0]) * self._per_token
        codes = 2 * records["experts"][:, :visits].astype(np.int64)
        codes += records["slots"][:, :visits] == MISSED
        for each in np.split(codes, rows, axis=1):
            each.sort(axis=1)
            self._used(each >> 1, (each & 1).astype(bool))
        together = [np.unique(each) for each in codes]  # experts are computed once for all rows
        absent = [each[each & 1 == 1] >> 1 for each in together]
        if RECORDER.on:
            for layer, record, mine, missed in zip(self._layers, records, together, absent, strict=True):
                _record(layer, record, (mine >> 1).tolist(), missed.tolist())
        misses = sum(map(len, absent))
        self._hits = sum(map(len, together)) - misses
        if rows == 1:  # others say nothing of what a single one takes
            self.pace.observe(token_s, misses, self._started)
            if self.choice is not None:
                self.choice.observe(token_s, misses)
        if token % _PRICED_EVERY == 0:
            for of_tokens in self._caches.values():
                of_tokens.cache.price_copies(self.pace.price)
        return absent

    def _used(self, experts: NDArray[np.int64], missed: NDArray[np.bool_]) -> None:
        """Policies and counters learn what a row used, [layers, n]."""
        for of_tokens in self._caches.values():
            numbers = list(of_tokens.layers.values())
            of_tokens.cache.looked_up(list(of_tokens.layers), experts[numbers] + of_tokens.first, missed[numbers])
        if self.observer is not None:
            self.observer.observe_all(experts)

    def _post_fetch(self, missed: Sequence[NDArray[np.int64]]) -> None:
        """Copies misses to slots; another layer's come first each time."""
        layers, most = len(missed), max(1, int(self.pace.token_s / self._layers[0].latency.transfer_s))
        is_full = all(of_tokens.cache.is_full for of_tokens in self._caches.values())
        room = self.pace.due(self._hits, most) if is_full else max(1, int(_FILLING * most))
        started = offered = self._started = 0
        if is_full and self._resting:
            self._resting -= 1
            return
        for _ in range(layers):
            if started == room or offered >= _OFFERED:
                break
            layer, absent = self._layers[self._first], missed[self._first].tolist()
            self._first = (self._first + 1) % layers
            offered += len(absent)
            if absent:
                held = layer.source.acquire(absent)
                started += layer.cache.post_fetch(layer.layer, absent, held, room - started)
                held.release()
        self.pace.started(started)
        self._started = started
        if offered:  # what was refused will be so for a while: what a policy counts changes slowly
            self._rest = 0 if started else min(2 * self._rest + 1, _LONGEST_REST)
            self._resting = self._rest


def choice_for(layers: Sequence[HybridExperts], per_token: int) -> PathChoice:
    """Between tokens of a device's own and the dispatcher's; as many experts miss at first as have no slots."""
    caches = {id(layer.cache): layer.cache for layer in layers}.values()
    slots, experts = sum(cache.slots for cache in caches), sum(layer.source.num_experts for layer in layers)
    missing = max(0.0, 1 - slots / experts)
    return PathChoice(layers[0].latency, len(layers), per_token, missing, layers[0].is_busy)


def _card_kernel(layer: HybridExperts) -> CardExperts | None:
    """What computes the layer's experts in slots of a real card; `None` if there are no slots."""
    if not layer.cache.slots:
        return None
    kernel = layer.cache.kernel(layer.make_kernel)
    assert isinstance(kernel, CardExperts)
    return kernel


def _finds_slots(layer: HybridExperts) -> bool:
    kernel = layer.cache.kernel(layer.make_kernel) if layer.cache.slots else None
    return kernel is None or (isinstance(kernel, CardExperts) and kernel.finds_slots)


def _native(layer: HybridExperts) -> ExpertsStruct:
    kernel = getattr(layer.source.kernel, "native", None)
    assert isinstance(kernel, NativeExperts)
    return kernel.struct


def _record(layer: HybridExperts, record: Any, experts: list[int], absent: list[int]) -> None:
    RECORDER.layer = number = layer.cache.layer_numbers[layer.layer]
    record_uses(experts, [expert for expert in experts if expert not in absent])
    times = {name: int(record[name]) for name in ("begun_ns", "computed_ns", "taken_ns", "answered_ns")}
    if hits := len(experts) - len(absent):
        RECORDER.span(
            lanes.GPU,
            lanes.EXPERTS,
            times["begun_ns"],
            times["computed_ns"],
            number,
            count=hits,
            device=layer.device.index,
        )
    if absent:
        RECORDER.span(
            lanes.CPU_EXPERTS, lanes.EXPERTS, times["taken_ns"], times["answered_ns"], number, count=len(absent)
        )


_REPLAYS = 2
_LIKE = 0.999
"""Cosine with what the CPU computes: both round x to 8 bits where weights are quantised."""


def tried_tokens(
    layers: Sequence[HybridExperts], kernels: NativeKernels, per_token: int, card: NvidiaCard
) -> tuple[CardTokens | None, str]:
    """`CardTokens` that give what the CPU gives, or why there are none, in a few words.  Raises nothing.

    Some of the experts are in slots afterwards.
    """
    tokens: CardTokens | None = None
    try:
        tokens = CardTokens(layers, kernels, per_token, card)
        with torch.inference_mode():
            _fill(layers, per_token)
            refused = _tried(tokens, layers, per_token)
    except Exception as error:  # of a compiler, a driver, a card: the dispatcher does it
        _log.warning("%s runs no tokens by itself", layers[0].device.name, exc_info=True)
        refused = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    if tokens is not None and refused:
        tokens.close()
        tokens = None
    return tokens, refused


def _fill(layers: Sequence[HybridExperts], per_token: int) -> None:
    """Brings half of a token's experts to the slots, as far as there are any."""
    for layer in layers:
        experts = list(range(min((per_token + 1) // 2, layer.source.num_experts, layer.cache.free_slots(layer.layer))))
        if experts:
            held = layer.source.acquire(experts)
            layer.cache.post_fetch(layer.layer, experts, held)
            held.release()
            layer.cache.wait()


def _tried(tokens: CardTokens, layers: Sequence[HybridExperts], per_token: int) -> str:
    """First launch by launch, which compiles and loads the kernels, then as a graph with other numbers each time: of a
    single row, and of as many as may be."""
    return _tried_rows(tokens, layers, per_token, 1) or _tried_rows(tokens, layers, per_token, tokens.most_rows)


def _tried_rows(tokens: CardTokens, layers: Sequence[HybridExperts], per_token: int, rows: int) -> str:
    device, place = layers[0].device, layers[0].device.torch_device
    drawn = torch.Generator().manual_seed(rows)
    count, hidden = len(layers), tokens.hidden
    x = torch.zeros(count, rows, hidden, dtype=torch.bfloat16, device=place)
    index = torch.zeros(count, rows, per_token, dtype=torch.int64, device=place)
    shares = torch.zeros(count, rows, per_token, device=place)

    def draw() -> None:
        x.copy_(torch.randn(x.shape, generator=drawn))
        shares.copy_(torch.rand(shares.shape, generator=drawn))
        for number, layer in enumerate(layers):
            for row in range(rows):
                experts = torch.randperm(layer.source.num_experts, generator=drawn)[:per_token]
                # By turns what is in slots, and as many others.
                index[number, row] = torch.arange(per_token) if (number + row) % 2 else experts

    def forward() -> torch.Tensor:
        return torch.stack([tokens.compute(layer, x[n], index[n], shares[n]) for n, layer in enumerate(layers)])

    def is_like(found: torch.Tensor) -> bool:
        found = found.cpu()
        for number, layer in enumerate(layers):
            wanted = layer.source.kernel(x[number].cpu(), index[number].cpu(), shares[number].cpu())
            like = torch.cosine_similarity(found[number].float(), wanted.float(), dim=-1)
            if not like.min().item() > _LIKE:
                return False
        return True

    draw()
    with tokens.trial():
        found = tokens.whole(forward)
    if not is_like(found):
        return "it computes something else than the CPU"
    assert device.new_capture is not None
    capture = device.new_capture()
    try:
        with tokens.trial():
            capture.begin()
            found = tokens.whole(forward)
            graph = capture.end()
        for _ in range(_REPLAYS):
            draw()
            with tokens.trial():
                graph.replay()
            if not is_like(found):
                return "repeated, it computes something else than the CPU"
    finally:
        capture.close()
    return ""
