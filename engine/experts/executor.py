"""The executor of an expert layer: routing, then records, then sums.

A layer whose experts are all in RAM, beside the rest of the model, needs none: its kernel is called directly, which
adds nothing to a decode step.  The others go the same way.  `Routing` says which tokens visit which experts, `Arrivals`
brings the records that are not in RAM while the others are computed, and `PartialSums` adds up what was computed in an
order that depends on neither.  Where the experts are computed is the configuration:

- `ExpertExecutor` by itself has no slots but the source's, in RAM over disk: the CPU computes all experts in place.
- `HybridExperts` (`engine.experts.dispatcher`) has slots on a device over them, and ways to serve what they miss.
- `WholeLayerExperts` (`engine.experts.whole_layer`) copies all experts, whatever the routing says: it needs neither
  routing nor sums, and the host never waits for the device to choose.

The CPU is not a device of the second kind: its streams would add a copy of the hidden states and of the results, and
several events, to each layer of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.common import clock
from engine.devices.device import upload
from engine.experts.record_source import Arrivals, RecordSource
from engine.kernels.interface import ExpertKernel, in_groups, is_capturable, rows_at_once
from engine.kernels.native.experts import MAX_TOKENS
from engine.telemetry import lanes
from engine.telemetry.lanes import CPU_EXPERTS, DENSE, EXPERTS
from engine.telemetry.recorder import RECORDER, DeviceWork

if TYPE_CHECKING:
    from engine.experts.ram_tier import RamTier

LAYER_NUMBER = "_switchyard_layer_number"
"""Attribute of an experts module: the number of its decoder layer, for the timeline."""

FEW_TOKENS = 8
"""Steps with more tokens use nearly all experts, which says nothing about popularity."""


def recorded_experts(
    module: Any,
    kernel: ExpertKernel,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    place: torch.device,
) -> torch.Tensor:
    """Calls `kernel` and records its spans.

    A kernel with `records_itself` records its own spans, and reports its submissions to `RECORDER.queued`, if set.
    """
    recorder, queued = RECORDER, RECORDER.queued
    records_itself = getattr(kernel, "records_itself", False)
    begun: DeviceWork | None = None
    begun_ns = clock.now_ns()
    recorder.layer = module.__dict__.get(LAYER_NUMBER, -1)
    if recorder.request:  # otherwise a trial run while loading, for which `layer_since_ns` is meaningless
        if queued is None:
            name, layer, count = recorder.named(DENSE, recorder.layer)
            recorder.dense(name, recorder.since_ns, begun_ns, layer, count)
        elif not records_itself or hidden.device != place:
            begun = queued.experts_begin(place)
    try:
        result = kernel(hidden, index, weights)
        if queued is not None and begun is not None and (hidden.device.type != "cpu" or is_capturable(kernel)):
            queued.experts_done(begun, place, index.numel())
            if len(index) <= FEW_TOKENS and recorder.uses is not None:  # waits for the device
                record_uses(index.flatten().tolist())
        elif not records_itself:
            _record_cpu_experts(begun_ns, index)
    finally:
        recorder.layer_since_ns = clock.now_ns()
        if queued is not None:
            queued.experts_end(place)
    return result


def _record_cpu_experts(begun_ns: int, index: torch.Tensor) -> None:
    """The CPU has computed the experts `index` [T, k], all of them from RAM."""
    recorder = RECORDER
    recorder.span(CPU_EXPERTS, EXPERTS, begun_ns, clock.now_ns(), count=index.numel())
    if len(index) <= FEW_TOKENS:
        recorder.on_cpu += index.numel()
        record_uses(index.flatten().tolist())
    else:
        recorder.many_on_cpu += index.numel()


def record_uses(experts: Sequence[int], hits: Iterable[int] = ()) -> None:
    """Records the experts that the current layer uses in a decode step, for the expert map.

    Args:
        hits: those of them that were already where they are computed; none for a layer without tiers.
    """
    recorder = RECORDER
    if recorder.uses is not None:
        recorder.uses.append((recorder.step, recorder.layer, experts, tuple(hits)))


_FEW_PAIRS = 1024
"""Up to so many, lists are faster than arrays."""

Pairs = list[int] | npt.NDArray[np.int64]


class Routing:
    """Which token visits which expert.  A pair identifies one visit: token * k + choice.

    Args:
        index: [T, k] on the host; ids at or above `experts` are not an expert.

    Attributes:
        index: as given; width: its k.
        visits: expert -> its pairs; experts in ascending order.
        absent: pairs that visit no expert.
    """

    def __init__(self, index: torch.Tensor, experts: int) -> None:
        self.index, self.width = index, index.shape[1]
        few = index.numel() <= _FEW_PAIRS
        self.visits, self.absent = _in_lists(index, experts) if few else _in_arrays(index, experts)
        self.experts = sorted(self.visits)

    def tokens(self, expert: int) -> int:
        """Number of tokens that visit the expert."""
        return len(self.visits[expert])

    def pairs(self, experts: Iterable[int]) -> torch.Tensor:
        """[n], the pairs of these experts, concatenated in this order."""
        return _joined([self.visits[expert] for expert in experts])


def _in_lists(index: torch.Tensor, experts: int) -> tuple[dict[int, Pairs], Pairs]:
    visits: dict[int, list[int]] = {}
    absent: list[int] = []
    for pair, expert in enumerate(index.reshape(-1).tolist()):
        if expert >= experts:
            absent.append(pair)
        elif expert in visits:
            visits[expert].append(pair)
        else:
            visits[expert] = [pair]
    return dict(visits), absent


def _in_arrays(index: torch.Tensor, experts: int) -> tuple[dict[int, Pairs], Pairs]:
    """The same for many pairs in a fraction of the time."""
    flat = index.reshape(-1).numpy()
    order = np.argsort(flat, kind="stable")
    found, begins = np.unique(flat[order], return_index=True)
    known = int(np.searchsorted(found, experts))
    begin_absent = int(begins[known]) if known < len(found) else len(order)
    parts = np.split(order[:begin_absent], begins[1:known])
    return dict(zip(found[:known].tolist(), parts, strict=True)) if known else {}, order[begin_absent:]


def _joined(parts: Sequence[Pairs]) -> torch.Tensor:
    if any(isinstance(part, np.ndarray) for part in parts):
        return torch.from_numpy(np.concatenate(parts))
    return torch.tensor([pair for part in parts for pair in part])


Work = Callable[[], None]

CALL_ROWS = 256
"""Rows per kernel call, unless one expert has more, so that the working set stays in the processor's cache."""
SUMMED_TOKENS = 32
"""Tokens summed at a time, for the same reason: their rows are twice as large in fp32."""


class PartialSums:
    """The weighted sum of one layer in one step.  The caller submits every `Work` returned to the compute stream.

    Args:
        hidden: [T, H] on the device, which may be the CPU.
        weights: [T, k] on the device.
        rows: [T * k, H] on the device, with `hidden`'s dtype; uninitialised.
        is_part: others have the rest of the sum: it is not rounded.

    Attributes:
        result: [T, H], once `finish` has run.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        routing: Routing,
        rows: torch.Tensor,
        *,
        is_part: bool = False,
    ) -> None:
        self._hidden, self._weights, self._routing, self._rows = hidden, weights, routing, rows
        self.result = torch.empty_like(hidden, dtype=torch.float32 if is_part else None)

    def on_device(self, kernel: ExpertKernel, slot_of: Mapping[int, int]) -> Work:
        """Computes these experts from the slots of a kernel on the device.

        The index tensors are uploaded now, asynchronously, rather than when the work runs.
        """
        most = rows_at_once(kernel) or CALL_ROWS
        calls = [self._call(kernel, *call) for call in self._calls(slot_of, slot_of, most)]

        def work() -> None:
            for call in calls:
                call()

        return work

    def _call(self, kernel: ExpertKernel, pairs: torch.Tensor, slots: list[int], counts: list[int]) -> Work:
        place, rows = self._hidden.device, self._rows
        grouped = in_groups(kernel, len(pairs))
        if grouped is None:
            places, ids = upload(torch.stack((pairs, _repeated(slots, counts))), place).unbind()
            return lambda: _put(rows, places, self._compute(kernel, self._hidden, places, ids))
        compute = grouped.for_groups(slots, counts, upload)
        tokens = torch.div(pairs, self._routing.width, rounding_mode="floor")
        places, tokens = upload(torch.stack((pairs, tokens)), place).unbind()
        return lambda: _put(rows, places, compute(self._hidden.index_select(0, tokens)))

    def on_host(
        self,
        kernel: ExpertKernel,
        hidden: torch.Tensor,
        experts: Sequence[int],
        slot_of: Mapping[int, int],
        out: torch.Tensor | None = None,
        most: int = CALL_ROWS,
    ) -> float:
        """Computes these experts' visits on the CPU now.

        Args:
            hidden: [T, H] on the host.
            slot_of: expert -> its row in the kernel's records.
            out: [visits, H] on the host, with `hidden`'s dtype, for `add` once it has been copied to the device; None
                if the rows are on the host, too.
            most: rows per kernel call, unless one expert has more.
        """
        begun_ns, begin = clock.now_ns(), 0
        for pairs, slots, counts in self._calls(experts, slot_of, most):
            computed = self._compute(kernel, hidden, pairs, _repeated(slots, counts))
            if out is None:
                _put(self._rows, pairs, computed)
            else:
                end = begin + len(pairs)
                out[begin:end] = computed
                begin = end
        ended_ns = clock.now_ns()
        if RECORDER.on:
            RECORDER.span(lanes.CPU_EXPERTS, lanes.EXPERTS, begun_ns, ended_ns, count=len(experts))
        return (ended_ns - begun_ns) / 1e9

    def add(self, contribution: torch.Tensor, experts: Sequence[int]) -> Work:
        """Adds the output of `on_host` for these experts, in this order."""
        pairs = upload(self._routing.pairs(experts), self._rows.device)

        def work() -> None:
            self._rows.index_copy_(0, pairs, contribution)

        return work

    def finish(self) -> Work:
        """Writes the sum to `result`."""
        tokens, width = self._weights.shape
        absent = self._routing.absent
        absent_pairs = upload(_joined([absent]), self._rows.device) if len(absent) else None

        def work() -> None:
            if absent_pairs is not None:
                self._rows[absent_pairs] = 0
            if tokens == 1:  # the same in half as many operators
                self.result.copy_(self._weights.float() @ self._rows.float())
                return
            rows, shares = self._rows.view(tokens, width, -1), self._weights.float()[:, None]
            for begin in range(0, tokens, SUMMED_TOKENS):
                some = slice(begin, begin + SUMMED_TOKENS)
                self.result[some].copy_(torch.bmm(shares[some], rows[some].float())[:, 0])

        return work

    def _calls(
        self, experts: Iterable[int], slot_of: Mapping[int, int], most: int
    ) -> Iterator[tuple[torch.Tensor, list[int], list[int]]]:
        """Successive kernel calls, of up to `most` rows unless one expert has more: pairs [n] sorted by expert, and
        the slot and the rows of each expert.
        """
        visits = self._routing.visits
        some: list[int] = []
        rows = 0
        for expert in experts:
            count = len(visits[expert])
            if some and rows + count > most:
                yield self._of(some, slot_of)
                some, rows = [], 0
            some.append(expert)
            rows += count
        if some:
            yield self._of(some, slot_of)

    def _of(self, experts: list[int], slot_of: Mapping[int, int]) -> tuple[torch.Tensor, list[int], list[int]]:
        routing = self._routing
        counts = [routing.tokens(expert) for expert in experts]
        return routing.pairs(experts), [slot_of[expert] for expert in experts], counts

    def _compute(
        self, kernel: ExpertKernel, hidden: torch.Tensor, pairs: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Computes each pair as a token with one expert; the router's weights are applied in `finish`."""
        count = ids.shape[0]
        if hidden.shape[0] > 1:
            mine = hidden.index_select(0, torch.div(pairs, self._routing.width, rounding_mode="floor"))
        else:
            mine = hidden.expand(count, -1)
        return kernel(mine, ids[:, None], _ones(count, ids.device))


def _put(rows: torch.Tensor, places: torch.Tensor, computed: torch.Tensor) -> None:
    rows.index_copy_(0, places, computed)


def _repeated(slots: list[int], counts: list[int]) -> torch.Tensor:
    """[n], each slot as often as it counts."""
    return torch.tensor([slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)])


def _ones(count: int, device: torch.device) -> torch.Tensor:
    """[count, 1] weights of 1, cached for small counts."""
    if count > CALL_ROWS:
        return torch.ones(count, 1, dtype=torch.float32, device=device)
    return _many_ones(CALL_ROWS, device)[:count]


@cache
def _many_ones(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, 1, dtype=torch.float32, device=device)


class StepObserver(Protocol):
    """Observes which experts decode steps use, to predict later ones."""

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Called once a layer's device work, copies and reads are queued, before the CPU computes its share.

        Args:
            experts: in ascending order.
            hidden: [T, H], input of the experts, where the layer is computed.
        """


class ExpertExecutor:
    """An `ExpertKernel` for one layer, computed on the CPU: first the experts in RAM, while the others are read.

    Args:
        source: its records.
        number: of the layer, for the observers.
        ahead: observes longer steps.

    Attributes:
        observer: observes steps of up to `MAX_TOKENS` tokens.
    """

    records_itself = True
    observer: StepObserver | None = None

    def __init__(self, source: RecordSource, number: int, ahead: RamTier | None = None) -> None:
        self.source, self._number, self._ahead = source, number, ahead

    def number_in_model(self, number: int) -> None:
        """Sets the number of its decoder layer, for the timeline of copies to a device."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`."""
        visits = top_k_index.numel()
        if not visits:
            return torch.zeros_like(hidden_states)
        routing = Routing(top_k_index, self.source.num_experts)
        rows = hidden_states.new_empty(visits, hidden_states.shape[1])
        sums = PartialSums(hidden_states, top_k_weights, routing, rows)
        is_short = hidden_states.shape[0] <= MAX_TOKENS
        # How a row is rounded may depend on the rows beside it: in longer steps those of its expert alone, whichever
        # experts happen to be in RAM, so that the same input gives the same bits.
        most = MAX_TOKENS if is_short else 1
        is_observed = False

        def observe() -> None:
            """Lets later layers' experts be read, once all of this step's own reads are queued."""
            nonlocal is_observed
            if is_observed or arrivals.left:
                return
            is_observed = True
            if not is_short:
                if self._ahead is not None:
                    self._ahead.begun(self._number, len(routing.experts), arrivals.read)
            elif self.observer is not None:
                self.observer.observe(self._number, routing.experts, hidden_states)

        arrivals = Arrivals(self.source, routing.experts, observe)
        try:
            for held, there in arrivals:
                if not (is_observed or arrivals.left):
                    observe()
                sums.on_host(self.source.kernel, hidden_states, there, held.rows, most=most)
        except BaseException:
            arrivals.release()
            raise
        if RECORDER.on and hidden_states.shape[0] <= FEW_TOKENS:
            RECORDER.on_cpu += len(routing.experts)
            record_uses(routing.experts, [expert for expert in routing.experts if expert not in arrivals.read])
        sums.finish()()
        return sums.result
