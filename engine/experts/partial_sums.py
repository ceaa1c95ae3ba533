"""One layer's output, assembled from parts computed in different places at different times.

Every visit of a token to an expert has its own row, and once all rows are there they are summed in fp32 in the router's
order.  So the sum does not depend on where or when an expert was computed, and the answer does not depend on what was
in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch

from engine.common import clock
from engine.devices.device import upload
from engine.kernels.interface import ExpertKernel, rows_at_once
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


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
        visits: dict[int, list[int]] = {}
        self.absent: list[int] = []
        for pair, expert in enumerate(index.reshape(-1).tolist()):
            if expert >= experts:
                self.absent.append(pair)
            elif expert in visits:
                visits[expert].append(pair)
            else:
                visits[expert] = [pair]
        self.experts = sorted(visits)
        self.visits = visits

    def tokens(self, expert: int) -> int:
        """Number of tokens that visit the expert."""
        return len(self.visits[expert])

    def pairs(self, experts: Iterable[int]) -> torch.Tensor:
        """[n], the pairs of these experts, concatenated in this order."""
        pairs: list[int] = []
        for expert in experts:
            pairs += self.visits[expert]
        return torch.tensor(pairs)


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

    Attributes:
        result: [T, H], once `finish` has run.
    """

    def __init__(self, hidden: torch.Tensor, weights: torch.Tensor, routing: Routing, rows: torch.Tensor) -> None:
        self._hidden, self._weights, self._routing, self._rows = hidden, weights, routing, rows
        self.result = torch.empty_like(hidden)

    def on_device(self, kernel: ExpertKernel, slot_of: Mapping[int, int]) -> Work:
        """Computes these experts from the slots of a kernel on the device.

        The index tensors are uploaded now, asynchronously, rather than when the work runs.
        """
        place = self._hidden.device
        most = rows_at_once(kernel) or CALL_ROWS
        calls = [upload(torch.tensor(both), place).unbind() for both in self._calls(slot_of, slot_of, most)]

        def work() -> None:
            for pairs, ids in calls:
                self._rows.index_copy_(0, pairs, self._compute(kernel, self._hidden, pairs, ids))

        return work

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

        Returns:
            How long it took, in seconds.
        """
        begun_ns, begin = clock.now_ns(), 0
        for numbers, ids in self._calls(experts, slot_of, most):
            pairs = torch.tensor(numbers)
            computed = self._compute(kernel, hidden, pairs, torch.tensor(ids))
            if out is None:
                self._rows.index_copy_(0, pairs, computed)
            else:
                end = begin + len(numbers)
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
        absent_pairs = upload(torch.tensor(absent), self._rows.device) if absent else None

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
    ) -> Iterator[tuple[list[int], list[int]]]:
        """(pairs [n], slots [n]) of successive kernel calls, with up to `most` rows unless one expert has more."""
        visits = self._routing.visits
        pairs: list[int] = []
        ids: list[int] = []
        for expert in experts:
            mine = visits[expert]
            if pairs and len(pairs) + len(mine) > most:
                yield pairs, ids
                pairs, ids = [], []
            pairs += mine
            ids += [slot_of[expert]] * len(mine)
        if pairs:
            yield pairs, ids

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


def _ones(count: int, device: torch.device) -> torch.Tensor:
    """[count, 1] weights of 1, cached for small counts."""
    if count > CALL_ROWS:
        return torch.ones(count, 1, dtype=torch.float32, device=device)
    return _many_ones(CALL_ROWS, device)[:count]


@cache
def _many_ones(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, 1, dtype=torch.float32, device=device)
