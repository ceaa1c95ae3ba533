"""One layer's result, put together from parts that are computed in different places and end at different times.

Every visit of a token to an expert has a row of its own, and the rows are summed in fp32 in the router's order once all
are there.  What an expert makes of a token is then the same wherever and whenever that happens, and so is the sum: the
answer does not depend on what the cache held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch

from engine.devices.device import upload
from engine.kernels.interface import ExpertKernel, rows_at_once


class Routing:
    """Which token visits which expert.  A pair is one token's visit: token * k + choice.

    Args:
        index: [T, k] on the host; ids at or above `experts` are no expert.

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
        """How many tokens visit it."""
        return len(self.visits[expert])

    def pairs(self, experts: Iterable[int]) -> torch.Tensor:
        """[n], the pairs of these experts, one expert after the other."""
        pairs: list[int] = []
        for expert in experts:
            pairs += self.visits[expert]
        return torch.tensor(pairs)


Work = Callable[[], None]

CALL_ROWS = 256
"""Rows that a kernel is given at once, unless one expert has more: what it works on stays in the processor's cache."""
SUMMED_TOKENS = 32
"""Tokens whose rows are summed at a time, for the same reason: in fp32 they are twice as big."""


class PartialSums:
    """The sum of one layer in one step.  What returns `Work` is to be submitted to the compute stream.

    Args:
        hidden: [T, H] on the device.
        weights: [T, k] on the device.
        rows: [T * k, H] on the device, of `hidden`'s type; what it holds does not matter.

    Attributes:
        result: [T, H], once `finish` has run.
    """

    def __init__(self, hidden: torch.Tensor, weights: torch.Tensor, routing: Routing, rows: torch.Tensor) -> None:
        self._hidden, self._weights, self._routing, self._rows = hidden, weights, routing, rows
        self.result = torch.empty_like(hidden)

    def on_device(self, kernel: ExpertKernel, slot_of: Mapping[int, int]) -> Work:
        """Computes these experts, which lie in slots of a kernel on the device.

        What says which is sent there now, not when the work's turn comes, and nobody waits for it.
        """
        place = self._hidden.device
        most = rows_at_once(kernel) or CALL_ROWS
        calls = [upload(torch.stack(both), place).unbind() for both in self._calls(slot_of, most)]

        def work() -> None:
            for pairs, ids in calls:
                self._rows.index_copy_(0, pairs, self._compute(kernel, self._hidden, pairs, ids))

        return work

    def on_host(
        self, kernel: ExpertKernel, hidden: torch.Tensor, slot_of: Mapping[int, int], out: torch.Tensor
    ) -> None:
        """What the CPU's kernel makes of these experts' visits, for `add` once it has been brought to the device.

        Args:
            hidden: [T, H] on the host.
            slot_of: expert -> its row among the kernel's records.
            out: [their visits, H] on the host, of `hidden`'s type.
        """
        begin = 0
        for pairs, ids in self._calls(slot_of):
            end = begin + len(pairs)
            out[begin:end] = self._compute(kernel, hidden, pairs, ids)
            begin = end

    def add(self, contribution: torch.Tensor, experts: Sequence[int]) -> Work:
        """Takes over what `on_host` gave for these experts, in this order."""
        pairs = upload(self._routing.pairs(experts), self._rows.device)

        def work() -> None:
            self._rows.index_copy_(0, pairs, contribution)

        return work

    def finish(self) -> Work:
        """Puts the sum into `result`."""
        tokens, width = self._weights.shape
        absent = self._routing.absent
        visits_nobody = upload(torch.tensor(absent), self._rows.device) if absent else None

        def work() -> None:
            if visits_nobody is not None:
                self._rows[visits_nobody] = 0
            rows, shares = self._rows.view(tokens, width, -1), self._weights.float()[:, None]
            for begin in range(0, tokens, SUMMED_TOKENS):
                some = slice(begin, begin + SUMMED_TOKENS)
                self.result[some].copy_(torch.bmm(shares[some], rows[some].float())[:, 0])

        return work

    def _calls(self, slot_of: Mapping[int, int], most: int = CALL_ROWS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(pairs [n], slots [n]) for one call of a kernel after the other, `most` rows for each if possible."""
        visits = self._routing.visits
        pairs: list[int] = []
        ids: list[int] = []
        for expert, slot in slot_of.items():
            mine = visits[expert]
            if pairs and len(pairs) + len(mine) > most:
                yield torch.tensor(pairs), torch.tensor(ids)
                pairs, ids = [], []
            pairs += mine
            ids += [slot] * len(mine)
        if pairs:
            yield torch.tensor(pairs), torch.tensor(ids)

    def _compute(
        self, kernel: ExpertKernel, hidden: torch.Tensor, pairs: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Each pair as a token with one expert; the router's weights come in at the end."""
        if len(hidden) > 1:
            mine = hidden.index_select(0, torch.div(pairs, self._routing.width, rounding_mode="floor"))
        else:
            mine = hidden.expand(len(pairs), -1)
        return kernel(mine, ids[:, None], _ones(len(ids), ids.device))


def _ones(count: int, device: torch.device) -> torch.Tensor:
    """[count, 1] weights that change nothing."""
    if count > CALL_ROWS:
        return torch.ones(count, 1, dtype=torch.float32, device=device)
    return _many_ones(CALL_ROWS, device)[:count]


@cache
def _many_ones(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, 1, dtype=torch.float32, device=device)
