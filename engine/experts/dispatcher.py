"""One layer's experts on two processors at once: hits on the device, misses on the CPU or fetched to the device.

Prefill and decode are scheduled differently (DuoServe): decode fills the cache and trains its policies; prefill uses
the residents and streams the rest through staging slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.common import clock
from engine.common.costs import Cost
from engine.common.errors import EngineError, ErrorCode
from engine.common.falls import FALLS
from engine.devices.failures import as_engine_error
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.activations import Activations
from engine.experts.executor import PartialSums, Routing, record_uses
from engine.experts.latency import LatencyModel
from engine.experts.misses import CACHE_OFF, MIXED, ExpertLayer, Step, Way, ways_of
from engine.experts.record_source import Arrivals, Held, RecordSource
from engine.experts.shares import PromptChoice, PromptWay, prompt_prices, split_among
from engine.experts.vram_cache import KernelMaker, Lookup, VramCache
from engine.hardware.probe import BusyLately, OtherPrograms
from engine.telemetry.recorder import RECORDER

if TYPE_CHECKING:
    from engine.experts.card_tokens import CardTokens

Working = Generator[None, None, torch.Tensor]
"""A step under way: it stops where the caller is about to compute, and returns the layer's output."""

BUNDLED_BYTES = 2**17
"""Hidden states up to this size are copied with the routing in case the CPU needs them, to save a second sync."""
DECODE_TOKENS = 64
"""Steps with more tokens are prefills, which do not change the cache (DuoServe)."""
STEP_ELEMENTS = 2**26
"""Elements of the visits [T * k, H] computed at a time: 128 MiB in bf16.  Longer steps are split."""


_busy_lately = BusyLately(OtherPrograms())


def _never() -> bool:
    return False


_JOINS_PER_WAIT = 64
"""Where a step's end is not waited for, one in so many is, to learn what joining both sides costs, or being alone."""
_NEARLY_ALL = 10
"""Where a prompt needs all but one in so many experts of a layer, it is taken to need those of the next layer."""
_GIVE_BACK_SHARE = 4
"""One part in so many of the cache is given back after a kernel has run out of device memory."""


def _ended(step: Working) -> torch.Tensor:
    """What a step returns that nothing else is done beside."""
    while True:
        try:
            next(step)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result


class HybridExperts(ExpertLayer):
    """An `ExpertKernel` for one layer with experts in RAM or on disk, some of them also in slots on the device.

    Layers of one device share `cache` and `activations`, and are called one at a time, from one thread.

    Args:
        cache, layer, source, make_kernel, latency, activations: see `ExpertLayer`.
        mode: how misses are served, see `engine.experts.misses.modes`.
        number: of the layer, for who observes decode steps; `layer` if None.

    Attributes:
        tokens: steps of a single token that the device computes by itself, if it does.
        after: the layer that is computed after this one, in the same cache, if there is one.
        prompts: how misses of prompts are served where there is a choice; layers that are alike share it.
        is_busy: whether other programs hold up what is timed.
        is_part: other cards have experts of this layer, too (`engine.experts.shared`); first: number of its own first.
        promised_s: seconds for which their misses keep the CPU in this step; own_s: likewise for its own.
    """

    tokens: CardTokens | None = None
    after: HybridExperts | None = None
    is_part, first = False, 0
    promised_s = own_s = 0.0

    def __init__(
        self,
        cache: VramCache,
        layer: int,
        source: RecordSource,
        make_kernel: KernelMaker,
        latency: LatencyModel,
        activations: Activations,
        mode: str = MIXED,
        number: int | None = None,
    ) -> None:
        super().__init__(cache, layer, source, make_kernel, latency, activations, layer if number is None else number)
        # An emulated device is a part of this machine's load, and what is modelled takes the same whatever else runs.
        self.is_busy = _busy_lately if cache.device.compute_follows_caller else _never
        self.prompts = PromptChoice(self.is_busy)
        self._joins, self._ahead_since_s = 0, 0.0
        self._landed: torch.Tensor | None = None
        self._before: tuple[float, int, tuple[PromptWay, float]] | None = None
        """Of the layer before, in this prompt: when its routing had come, its tokens, its way and the price of that."""
        self._has_read = False
        self.serve_by(mode)

    def serve_by(self, mode: str) -> None:
        """Sets how misses are served from the next step on."""
        self.mode = mode
        self._host, self._ways = ways_of(mode, self)
        self._away = [way for way in self._ways if not way.keeps_caller]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`; all three are on the device.

        Raises:
            EngineError: a kernel or a copy failed with no fallback, or an expert could not be read.  Nothing stays
                pinned, and the streams have recovered if possible.
        """
        if self.tokens is not None and self.is_capturable:
            return self.tokens.compute(self, hidden_states, top_k_index, top_k_weights)
        return _ended(self._step(hidden_states, top_k_index, top_k_weights, len(top_k_index) > DECODE_TOKENS))

    def part(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        landed: torch.Tensor | None,
        *,
        misses_on_cpu: bool = False,
    ) -> Working:
        """As `__call__`, of a layer that other cards have experts of, too.  The sum is in 32 bits.

        Args:
            index: on the host, by its own numbers; at or above their count are experts of others.
            landed: `hidden` on the host, if it is there.
            misses_on_cpu: all of them, and the cache stays as it is.
        """
        self._landed, self.own_s = landed, 0.0
        if misses_on_cpu:
            return self._with_misses_on_cpu(hidden, index, weights)
        return self._step(hidden, index, weights, len(index) > DECODE_TOKENS)

    @property
    def is_capturable(self) -> bool:
        """Whether this is a token of the device's own, which finds the experts itself."""
        return self.tokens is not None and self.tokens.is_open and self.tokens.is_captured

    @property
    def captured(self) -> object:
        """What a captured step with it relies on."""
        return self.tokens.slots_known if self.tokens is not None else None

    def with_misses_on_cpu(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `__call__`, but computes all misses on the CPU and does not change the cache."""
        return _ended(self._with_misses_on_cpu(hidden, index, weights))

    def _with_misses_on_cpu(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Working:
        ways, self._ways = self._ways, [self._host]
        after, self.after = self.after, None  # no expert of the next layer is brought ahead either
        try:
            return (yield from self._step(hidden, index, weights, is_prefill=True))
        finally:
            self._ways, self.after = ways, after

    def _step(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, is_prefill: bool) -> Working:
        if not index.numel():
            return torch.zeros_like(hidden)
        tokens, width = index.shape
        pieces = min(tokens, -(-tokens * width * hidden.shape[1] // STEP_ELEMENTS))
        return (yield from self._in_pieces(hidden, index, weights, pieces, is_prefill))

    def _in_pieces(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, pieces: int, is_prefill: bool
    ) -> Working:
        if pieces == 1:
            return (yield from self._attempt(hidden, index, weights, is_prefill))
        cut = [tensor.tensor_split(pieces) for tensor in (hidden, index, weights)]
        after, results = self.after, list[torch.Tensor]()
        try:
            for number, piece in enumerate(zip(cut[0], cut[1], cut[2], strict=True)):
                self.after = self if number + 1 < pieces else after
                results.append((yield from self._attempt(*piece, is_prefill)))
        finally:
            self.after = after
        return torch.cat(results)

    def _attempt(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        is_prefill: bool,
        *,
        is_last: bool = False,
    ) -> Working:
        """Runs a step; if memory or a copy fails, retries with less memory or on the CPU."""
        keeps = not is_prefill and self.mode != CACHE_OFF
        step = Step(hidden, is_prefill, keeps, False, Lookup(self.layer))
        refused: DeviceMemoryError | None = None
        try:
            result = yield from self._run(step, index, weights)
        except BaseException as error:
            copy_has_failed = any(way.has_failed for way in self._ways)
            missed = list(step.lookup.misses)
            kernel_is_short = isinstance(error, EngineError) and error.code == ErrorCode.NOT_ENOUGH_MEMORY
            fewer = kernel_is_short and self._can_halve_groups(step)
            if fewer:
                self.cache.uncount(step.lookup)
            self._give_up(step)
            if isinstance(error, DeviceMemoryError):
                refused = error
            elif kernel_is_short or (copy_has_failed and isinstance(error, EngineError)):
                pass  # retried below, outside the handler, which keeps the step's tensors alive
            elif isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            else:
                raise as_engine_error(error, f"{self.device.name} experts") from None
        else:
            self._count(step)
            return result
        if refused is None:
            if kernel_is_short:
                self.cache.give_back(max(self.cache.nbytes // _GIVE_BACK_SHARE, 1))
            if fewer:
                return (yield from self._attempt(hidden, index, weights, is_prefill))
            return (yield from self._recompute(step, missed, index, weights))
        if self.cache.give_back(refused.asked):
            return (yield from self._attempt(hidden, index, weights, is_prefill, is_last=is_last))
        freed = self.activations.shrink()  # buffers of a larger step take from the others of a smaller one
        if len(index) > 1:
            return (yield from self._in_pieces(hidden, index, weights, 2, is_prefill))
        if freed and not is_last:
            return (yield from self._attempt(hidden, index, weights, is_prefill, is_last=True))
        raise refused

    def _can_halve_groups(self, step: Step) -> bool:
        """After a kernel has run out of device memory: fewer fetched experts are computed together from now on."""
        staging = self.cache.staging
        if not (step.is_prefill and step.fetched) or staging is None or staging.most_together == 1:
            return False
        staging.most_together //= 2
        return True

    def _recompute(self, failed: Step, missed: list[int], index: torch.Tensor, weights: torch.Tensor) -> Working:
        """Runs a step again, entirely on the CPU, after a copy failed or a kernel ran out of memory."""
        FALLS.say(f"A step on {self.device.name}", "the CPU", "a copy to the card failed, or its memory was used up")
        step = Step(failed.hidden, failed.is_prefill, False, True, Lookup(self.layer))
        try:
            result = yield from self._run(step, index, weights)
        except BaseException as error:
            self._give_up(step)
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise as_engine_error(error, f"{self.device.name} experts") from None
        if self.mode != CACHE_OFF:
            self.cache.count_served(failed.lookup, len(missed), 0, recomputed=step.on_cpu)
        return result

    def _run(self, step: Step, index: torch.Tensor, weights: torch.Tensor) -> Working:
        """Yields where the device has been given what it can do, and the caller is about to compute."""
        routing = step.routing = self._routing(step, index)
        rows = self.activations.rows((index.numel(), step.hidden.shape[1]), step.hidden.dtype)
        sums = step.sums = PartialSums(step.hidden, weights, routing, rows, is_part=self.is_part)
        lookup = step.lookup = self._look_up(step, routing)
        if RECORDER.on and not step.is_prefill:
            first = self.first
            record_uses([first + expert for expert in routing.experts], [first + hit for hit in lookup.hits])
        begun_s = clock.now()
        self._observe_before(begun_s)
        if step.is_prefill and self._ahead_since_s:
            self.latency.costs.observe(Cost.BETWEEN, 1, begun_s - self._ahead_since_s)
        self._ahead_since_s = 0.0
        sides = self._sides(step, routing) if lookup.hits else {}
        side = self.latency.side(len(routing.experts), self.is_busy)
        # The time of a part is that of the other cards, too: nothing is learnt from it.
        alone = bool(sides) and (sides[True] < sides[False] if self.is_part else side.take(sides))
        if alone:
            if self.is_part:
                self.own_s = sum(self.latency.cpu_s(routing.tokens(expert)) for expert in routing.experts)
                yield
            self._compute_all_on_cpu(step)
        else:
            step.hits_wait = bool(lookup.hits)
            if lookup.misses:
                if not (step.is_prefill and self.source.has_all):
                    self.compute_hits(step)  # otherwise the link begins before the host plans a prompt's hits
                yield from self._serve_misses(step)
            else:
                self.plan_hits(step)
                self._bring_ahead(step)
        step.pending.append(sums.finish())
        end = self.submit(step)
        assert end is not None
        self._notify_prefetcher(step)
        learns = bool(sides) and not self.is_part
        self._joins += learns
        waits = learns and (side.is_learning or self._joins % _JOINS_PER_WAIT == 0)
        if not self.device.compute_follows_caller or end.failure is not None or waits:
            end.wait()
            if learns and not step.fetched:
                side.observe(alone, clock.now() - begun_s, sides[alone])
        self.cache.release(lookup, end)
        if self.after is not None:
            self.after._before = None
            if step.price is not None and self._has_read:  # a first prompt meets memory that nobody has touched
                self.after._before = begun_s, len(step.hidden), step.price
        self._has_read |= step.is_prefill
        return sums.result

    def _observe_before(self, now_s: float) -> None:
        """The layer before is done when the routing of this one has come, which waits for it."""
        before, self._before = self._before, None
        if before is not None:
            since_s, tokens, (way, price_s) = before
            self.prompts.observe(tokens, way, now_s - since_s, price_s)

    def _sides(self, step: Step, routing: Routing) -> dict[bool, float]:
        """Seconds with and without the device, if there is a choice: small experts may be done on the CPU before a
        kernel launch would be."""
        if step.is_prefill or self.mode != MIXED or not self.source.has_all:
            return {}
        hits, misses = self._tokens(step.lookup, routing)
        coming = [miss for miss in step.lookup.misses for way in self._away if miss in way.ahead()]
        for expert in coming:  # these are as good as there
            hits.append(routing.tokens(expert))
            misses.remove(routing.tokens(expert))
        return self.latency.sides(hits, misses)

    def _tokens(self, lookup: Lookup, routing: Routing) -> tuple[list[int], list[int]]:
        """Token counts of each hit, and of each miss."""
        return [routing.tokens(hit) for hit in lookup.hits], [routing.tokens(miss) for miss in lookup.misses]

    def _compute_all_on_cpu(self, step: Step) -> None:
        experts = step.routing.experts
        held = self.source.acquire(experts)
        step.held.append(held)
        if step.lookup.misses:
            self.cache.post_fetch(self.layer, step.lookup.misses, held, max(0, self.source.lendable))
        self._notify_prefetcher(step)
        step.on_cpu, step.hits_on_cpu = len(step.lookup.misses), len(step.lookup.hits)
        self._host.serve(step, experts, held)
        held.release()

    def _routing(self, step: Step, index: torch.Tensor) -> Routing:
        """Copies the routing to the host, the only sync of a step, together with small hidden states."""
        if self.is_part:
            landed, self._landed = self._landed, None
            step.host_hidden = landed if landed is not None and len(landed) == len(step.hidden) else None
            for way in self._away:
                way.observe()
            return Routing(index, self.source.num_experts)
        tensors = [index]
        if step.hidden.nbytes <= BUNDLED_BYTES:
            tensors.append(step.hidden)
        copied = self.activations.bundle_to_host(tensors)
        step.host_hidden = copied[1] if len(copied) == 2 else None
        for way in self._away:
            way.observe()
        return Routing(copied[0], self.source.num_experts)

    def _look_up(self, step: Step, routing: Routing) -> Lookup:
        if self.mode == CACHE_OFF or step.only_host:
            return Lookup(self.layer, misses=routing.experts, is_use=False)
        look_up = self.cache.hold if step.is_prefill else self.cache.acquire
        return look_up(self.layer, routing.experts)

    def _serve_misses(self, step: Step) -> Generator[None, None, None]:
        """Serves the misses whose records are in RAM first, the others as they arrive."""
        busy_s = self.latency.hits_s([step.routing.tokens(expert) for expert in step.lookup.hits])
        arrivals = Arrivals(self.source, step.lookup.misses, lambda: self._notify_prefetcher(step))
        step.held.append(arrivals)
        for held, there in arrivals:
            yield from self._serve(step, held, there, busy_s)
            busy_s = 0.0  # later batches account for submitted device work through the backlog of the link

    def _serve(self, step: Step, held: Held, experts: list[int], busy_s: float) -> Generator[None, None, None]:
        """Serves misses whose records are in RAM."""
        on_caller: list[tuple[Way, list[int]]] = []
        on_cpu: list[int] = []
        shares = self._share(step, experts, busy_s)
        for way, mine in shares if len(shares) > 1 else ():
            way.prepare(step, mine)
        for way, mine in shares:
            if way.keeps_caller:
                on_caller.append((way, mine))
                on_cpu += mine
            else:
                way.serve(step, mine, held)
                step.fetched += len(mine)
        self.compute_hits(step)
        if step.keeps and on_cpu:
            # Queued behind the urgent copies, and overlapped with the CPU, which reads the same records.
            self.cache.post_fetch(self.layer, on_cpu, held, max(0, self.source.lendable))
        self._notify_prefetcher(step)
        step.on_cpu += len(on_cpu)
        if step.on_cpu + step.fetched == len(step.lookup.misses):
            self._bring_ahead(step)  # behind this layer's own copies, while the CPU computes
        if self.is_part and on_cpu and self.source.has_all:  # slots in RAM are not kept while others are given work
            self.own_s += sum(self.latency.cpu_s(step.routing.tokens(expert)) for expert in on_cpu)
            yield
        for way, mine in on_caller:
            way.serve(step, mine, held)

    def _share(self, step: Step, experts: list[int], busy_s: float) -> list[tuple[Way, list[int]]]:
        """Assigns each expert to a way."""
        if step.only_host:
            return [(self._host, experts)]
        ways = [way for way in self._ways if way.is_possible]
        if len(ways) < 2:
            return [(ways[0] if ways else self._host, experts)]
        if step.is_prefill and self.source.has_all and len(ways) == 2 and not ways[1].keeps_caller:
            return self._share_of_prompt(step, experts, ways, busy_s)
        late, routing = step.lookup.late, step.routing
        coming = [way.ahead() for way in ways]
        taken = late.union(*coming)
        free = [(expert, routing.tokens(expert)) for expert in experts if expert not in taken]
        estimates = [way.estimate(step, busy_s) for way in ways]
        kept_s = sum(len(ahead) * each.caller_s for ahead, each in zip(coming, estimates, strict=True))
        if kept_s + self.promised_s:
            estimates[0] = replace(estimates[0], busy_s=kept_s + self.promised_s)
        shares = split_among(free, estimates)
        for mine, ahead in zip(shares, coming, strict=True):
            if ahead:
                mine[:0] = [expert for expert in experts if expert in ahead and expert not in late]
        if late:  # already being copied to a slot: do not copy it twice
            shares[0] = [*(expert for expert in experts if expert in late), *shares[0]]
        return [(way, mine) for way, mine in zip(ways, shares, strict=True) if mine]

    def _share_of_prompt(
        self, step: Step, experts: list[int], ways: list[Way], busy_s: float
    ) -> list[tuple[Way, list[int]]]:
        """The same where all can be had in each way: as has been soonest."""
        tokens, shares = len(step.hidden), [experts, experts]
        chosen = self.prompts.rests(tokens)
        if chosen is None:
            misses = [(expert, step.routing.tokens(expert)) for expert in experts]
            estimates = [way.estimate(step, busy_s) for way in ways]
            if self.promised_s:
                estimates[0] = replace(estimates[0], busy_s=self.promised_s)
            prices, shares = prompt_prices(misses, ways[1].ahead(), estimates, busy_s)
            chosen = self.prompts.choose(tokens, prices)
            step.price = chosen, prices[chosen]
        if chosen is not PromptWay.SHARED:
            return [(ways[1] if chosen is PromptWay.FETCHED else ways[0], experts)]
        return [(way, mine) for way, mine in zip(ways, shares, strict=True) if mine]

    def _bring_ahead(self, step: Step) -> None:
        """Lets experts of the next layer come once those of this one are on their way: a prompt needs nearly all."""
        needed, after = step.routing.experts, self.after
        if (
            after is None
            or not step.is_prefill
            or _NEARLY_ALL * len(needed) < (_NEARLY_ALL - 1) * self.source.num_experts
            or self.prompts.way(len(step.hidden)) is PromptWay.ON_CPU
        ):
            return
        most = step.fetched if step.lookup.misses else self.source.num_experts
        if self.cache.staging is not None:  # those that cost no time, whatever would be the best share otherwise
            most = max(most, self.latency.fit_between_layers(self.cache.staging.arriving))
        after._ahead_since_s = clock.now()
        if most:
            for way in after._away:
                way.bring_ahead(most)

    def _notify_prefetcher(self, step: Step) -> None:
        if self.observer is not None and not (step.is_observed or step.is_prefill or step.only_host):
            step.is_observed = True
            self.observer.observe(self._number, step.routing.experts, step.hidden)

    def _count(self, step: Step) -> None:
        if self.mode != CACHE_OFF:
            self.cache.count_served(
                step.lookup, step.on_cpu, step.fetched, came_ahead=step.came_ahead, hits_on_cpu=step.hits_on_cpu
            )

    def _give_up(self, step: Step) -> None:
        """Waits until nothing is in flight and releases everything, so that the next request starts clean."""
        for way in self._ways:
            way.forget()
        if self.after is not None:
            self.after._ahead_since_s, self.after._before = 0.0, None
        with contextlib.suppress(EngineError):  # a device that cannot recover raises again on its next use
            self.device.recover()
        self.activations.forget_uses()
        with contextlib.suppress(EngineError):
            self.cache.forget_uses()
        self.cache.release(step.lookup)
        for held in step.held:
            held.release()
