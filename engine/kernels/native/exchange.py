"""Tokens that a card runs by itself, while a native thread computes the experts that have no slot on it.

What the two tell each other, and in which order, is in `exchange.h`; nothing of it is Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.common.errors import EngineError, ErrorCode
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.structs import ExchangeLayoutStruct, ExchangeShapeStruct, ExpertsStruct

MOST_CHOSEN = 32
"""Experts that a row may choose in a layer."""
MOST_VISITS = 128
"""The same of all rows of a token."""
MISSED = -1
"""In place of a slot: an expert without one.  Less: no expert."""
_LIMIT_NS = 60 * 10**9
"""How long a card waits for missed experts before it gives its token up: longer than any machine is away."""
_DEPTH = 2
_RUNS, _CANCELLED, _FAILED, _OVERDUE = -1, 1, 2, 3

CARD_LAYER = np.dtype(
    [
        ("token", "<u8"),
        *((name, "<i8") for name in ("begun_ns", "posted_ns", "computed_ns", "joined_ns", "taken_ns", "answered_ns")),
        ("rows", "<i8"),
        ("count", "<i4"),
        ("missed", "<i4"),
        ("experts", "<i4", MOST_VISITS),
        ("slots", "<i4", MOST_VISITS),
    ]
)
"""`SwitchyardCardLayer`: what one layer of a token did."""


class OverdueError(EngineError):
    """The card has waited too long for experts that the CPU computes: its token came to nothing."""


class NativeExchange:
    """A card's tokens and the thread beside them.  A token may be a few rows that are computed together.

    Args:
        layers: the experts of each layer, as they are in RAM; they must stay.
        experts: most of a layer.
        most: experts that a row chooses in a layer, up to `MOST_CHOSEN`.
        rows: most of a token; all of them choose up to `MOST_VISITS`.
        allocate: makes what the card and the host share, uint8 on the CPU and page-aligned; it is used until `close`.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        layers: Sequence[ExpertsStruct],
        experts: int,
        most: int,
        rows: int,
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        self._kernels, self._layers = kernels, list(layers)
        self.shape = ExchangeShapeStruct(len(layers), experts, layers[0].hidden, most, rows, _DEPTH)
        self.memory = allocate(int(self._kernels.exchange_bytes(ctypes.byref(self.shape))))
        addresses = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
        memory = self.memory.data_ptr()
        made = kernels.exchange_create(ctypes.byref(self.shape), memory, kernels.pool, addresses, _LIMIT_NS)
        if not made:
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left for tokens on the card.")
        self.address: int = made

    def compute_in_turn(self) -> None:
        """From the next token on the card computes its experts before it asks for others: each takes its own time."""
        self._kernels.exchange_in_turn(self.address)

    def change(self, layer: int, expert: int, slot: int | None) -> None:
        """From the next token on an expert is in this slot, or in none."""
        self._kernels.exchange_change(self.address, layer, expert, -1 if slot is None else slot)

    def start(self) -> int:
        """Begins a token, which the caller's kernels compute: its number."""
        return int(self._kernels.exchange_start(self.address))

    def end(self) -> None:
        """Ends it.

        Raises:
            OverdueError: missed experts were not computed in time.
            EngineError: they could not be computed, or the token was cancelled.
        """
        _check(self._kernels.exchange_end(self.address))

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end of a token that a real card computes; false if that took longer than `timeout_s`.

        Raises:
            OverdueError, EngineError: as `end`.
        """
        result = self._kernels.exchange_wait(self.address, int(timeout_s * 1e9))
        if result == _RUNS:
            return False
        _check(result)
        return True

    def layout(self) -> ExchangeLayoutStruct:
        """Where everything lies in `memory`."""
        found = ExchangeLayoutStruct()
        self._kernels.exchange_layout(self.address, ctypes.byref(found))
        return found

    def cancel(self) -> None:
        """The token under way waits for nothing any more, and `end` raises.  On any thread."""
        self._kernels.exchange_cancel(self.address)

    def records(self) -> NDArray[np.void]:
        """[layers] of `CARD_LAYER`: the last token's, which has ended."""
        begin = self._kernels.exchange_records(self.address)
        rows = ctypes.string_at(begin, len(self._layers) * CARD_LAYER.itemsize)
        return np.frombuffer(rows, CARD_LAYER)

    def close(self) -> None:
        """Ends the thread.  No token may be under way; idempotent."""
        if self.address:
            self._kernels.exchange_destroy(self.address)
            self.address = 0


def _check(result: int) -> None:
    if result == _FAILED:
        raise out_of_memory()
    if result == _OVERDUE:
        raise OverdueError(ErrorCode.INTERNAL, "A token on the card waited too long for experts that the CPU computes.")
    if result == _CANCELLED:
        raise EngineError(ErrorCode.INTERNAL, "A token on the card was cancelled.")
