"""A card's side of tokens that it runs by itself: the kernels of `exchange.cu`, captured once and then repeated.

The card waits for the host inside a kernel and not by `cuStreamWaitValue`: the number waited for grows with each token,
and a captured wait would repeat the first one's; and only a kernel can give up, by the card's own clock.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.cuda.compiled import THREADS, Argument, Kernel
from engine.kernels.cuda.driver import NvidiaCard, OnCard
from engine.kernels.native.exchange import NativeExchange

LIMIT_NS = 10**9
"""How long a card waits for the experts that one layer misses: half of what Windows lets a kernel of a card with a
display take, and many times what any CPU needs for them."""
_COLUMNS = 4 * THREADS
_ENTRIES = 16 * THREADS
"""Of a table, for each block."""


def _part(name: str) -> Kernel:
    return Kernel("exchange.cu", (("SWITCHYARD_PART", name),))


_BEGIN, _POST, _JOIN, _FINISH = (_part(name) for name in ("begin", "post", "join", "finish"))


def exchange_kernels() -> list[Kernel]:
    """All of them."""
    return [_BEGIN, _POST, _JOIN, _FINISH]


class CudaExchange(OnCard):
    """What a card does of a token beside computing.  Its calls are launches, one after the other on one stream.

    Args:
        exchange: in memory that the card has, too.
        place: the card's device.

    Raises:
        DriverError: the card has not got the memory.
    """

    def __init__(
        self, card: NvidiaCard, exchange: NativeExchange, place: torch.device, limit_ns: int = LIMIT_NS
    ) -> None:
        super().__init__(card)
        shape, layout = exchange.shape, exchange.layout()
        self._own = torch.zeros(2, dtype=torch.int64, device=place)
        self._slot_of = torch.full((shape.layers, shape.experts), -1, dtype=torch.int32, device=place)
        self._always: dict[str, Argument] = {
            "shared": card.address_of(exchange.memory),
            "own": self._own,
            "slot_of": self._slot_of,
            "limit_ns": limit_ns,
            "rows_at": layout.rows,
            "answer_at": layout.answer,
            "records_at": layout.records,
            "tables_at": layout.tables,
            **{name: getattr(shape, name) for name in ("layers", "experts", "hidden", "depth")},
        }
        self._blocks = max(1, self._slot_of.numel() // _ENTRIES)
        self._row_blocks = -(-shape.hidden // _COLUMNS)

    def begin(self) -> None:
        """First of a token, which the host has started."""
        self.start(_BEGIN, (self._blocks, 1, 1), **self._always)

    def slot_of(self, layer: int) -> torch.Tensor:
        """int32 [experts] on the card: the slot of each expert in the token under way, -1 for those that have none."""
        return self._slot_of[layer]

    def post(self, layer: int, ids: torch.Tensor, x: torch.Tensor) -> None:
        """Asks the host for what those of a layer's experts make of x that have no slot.

        Args:
            ids: int64 [rows * k].
            x: bf16 [rows, hidden], contiguous.
        """
        self._launch(_POST, (1, 1, 1), layer, ids, len(x), x=x)

    def join(
        self, layer: int, ids: torch.Tensor, shares: torch.Tensor, outputs: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Waits for the host, and adds up the outputs of all experts in the order of their numbers.

        Args:
            shares: float32 [rows * k].
            outputs: bf16 [rows * k, hidden] of the experts in slots; `None`: there are no slots.

        Returns:
            bf16 [rows, hidden] as `like`; of no use if the host did not answer, which `NativeExchange.wait` says.
        """
        out = torch.empty_like(like)
        grid = self._row_blocks, len(like), 1
        self._launch(_JOIN, grid, layer, ids, len(like), shares=shares, outputs=outputs, out=out)
        return out

    def finish(self) -> None:
        """Last of a token: no slot is read any more."""
        self.start(_FINISH, (1, 1, 1), **self._always)

    def _launch(
        self, kernel: Kernel, grid: tuple[int, int, int], layer: int, ids: torch.Tensor, rows: int, **places: Argument
    ) -> None:
        sizes = {"layer": layer, "rows": rows, "count": len(ids) // rows}
        self.start(kernel, grid, ids=ids, **self._always, **sizes, **places)


class CardTimes:
    """The stamps of a card in records, by the host's clock.

    A card asks before the host begins to answer, and goes on after the host has answered: each record with an answer
    says within which bounds the two clocks differ.
    """

    def __init__(self) -> None:
        self._ahead_ns = 0

    def on_host(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """A copy of a token's records with all times by the host's clock; 0 stays 0."""
        asked = records[records["answered_ns"] > 0]
        if len(asked):
            most = int((asked["taken_ns"] - asked["posted_ns"]).min())
            least = int((asked["answered_ns"] - asked["joined_ns"]).max())
            self._ahead_ns = (most + least) // 2
        found = records.copy()
        for name in ("begun_ns", "posted_ns", "computed_ns", "joined_ns"):
            found[name] += np.where(found[name] > 0, self._ahead_ns, 0)
        return found


def handover_ns(records: NDArray[np.void]) -> NDArray[np.int64]:
    """Of each layer that asked the host: from its asking to its sum, less what the host computed, ns."""
    asked = records[records["answered_ns"] > 0]
    spent: NDArray[np.int64] = asked["joined_ns"] - asked["posted_ns"] - (asked["answered_ns"] - asked["taken_ns"])
    return spent
