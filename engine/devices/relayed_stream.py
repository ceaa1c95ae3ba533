"""A card's stream whose copies from memory that is not pinned do not hold up whoever submits them.

A driver copies from such memory while its caller waits: experts in a mapped file or beyond the limit of pinned memory
would stop the thread that decodes, which may hold a cache's lock.  Here a thread carries them through a few pinned
buffers in turn, filling one while the card reads others.  What is submitted meanwhile queues behind them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from engine.common.errors import EngineError
from engine.devices.card_stream import CardClock, CardEvent, CardStream, Copied, TorchCards, direction_of
from engine.devices.device import CopyLog, Direction, Event
from engine.devices.failures import closed_error

BUFFERS, BUFFER_BYTES = 4, 2 * 2**20
WORTH_BYTES = 2**16
"""Drivers take copies up to this size from their caller without waiting."""

Pinned = Callable[[int], torch.Tensor | None]
"""Allocates bytes [n] that are pinned; None if that is refused."""


def pinned_bytes(nbytes: int) -> torch.Tensor | None:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # there is no driver, or it has a limit
        return None


class RelayedStream(CardStream):
    """See above.

    Args:
        is_pinned: whether the card copies from a tensor without its caller waiting; pinned: for the buffers, which
            are taken at the first use.  Without them the thread copies as the driver does.
    """

    def __init__(
        self,
        name: str,
        stream: Any,
        cards: TorchCards,
        clock: CardClock,
        copy_log: CopyLog,
        *,
        is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned,
        pinned: Pinned = pinned_bytes,
    ) -> None:
        super().__init__(name, stream, cards, clock, copy_log)
        self._is_pinned = is_pinned
        self._pinned = pinned
        self._buffers: list[torch.Tensor] | None = None
        self._last_use: list[Any] = [None] * BUFFERS
        self._next = 0
        self._changed = threading.Condition(self._turn)
        # What is not yet in the card's queue, with its event unless it is a wait.  The first one is under way.
        self._queued: deque[tuple[CardEvent | None, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def wait(self, event: Event) -> None:
        with self._turn:
            self._require_open()
            if self._queued:
                self._queue_up(None, lambda: CardStream.wait(self, event))
                return
        super().wait(event)

    def recover(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._queued)
            super().recover()

    def _run(self, work: Callable[[], object] | None, copied: Copied | None = None) -> Event:
        with self._turn:
            return self._later(work, copied) if self._queued else super()._run(work, copied)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None) -> Event:
        taken = direction or direction_of(destination, source)
        whole = destination.is_contiguous() and source.is_contiguous()
        if taken is not Direction.H2D or source.nbytes < WORTH_BYTES or not whole or self._is_pinned(source):
            return super()._copy(destination, source, taken)
        with self._turn:
            return self._later(lambda: self._carry(destination, source), (taken, source.nbytes, (destination, source)))

    def _later(self, work: Callable[[], object] | None, copied: Copied | None) -> Event:
        self._require_open()
        event = CardEvent(self.name, self._copy_log, copied)
        event.later()
        self._queue_up(event, lambda: self._place(event, work, is_copy=copied is not None))
        return event

    def _queue_up(self, event: CardEvent | None, place: Callable[[], None]) -> None:
        self._queued.append((event, place))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"{self.name} relay", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _serve(self) -> None:
        with torch.inference_mode():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queued or self._closed)
                    if not self._queued:
                        return
                    event, place = self._queued[0]
                    is_closed = self._closed
                if is_closed and event is not None:
                    event.fail(closed_error(self.name))
                elif not is_closed:
                    with contextlib.suppress(EngineError):  # closed since
                        place()
                with self._changed:
                    self._queued.popleft()
                    self._changed.notify_all()
                del event, place  # they hold tensors

    def _carry(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies through the buffers; on the thread."""
        if self._buffers is None:
            found = [self._pinned(BUFFER_BYTES) for _ in range(BUFFERS)]
            self._buffers = [buffer for buffer in found if buffer is not None]
        if destination.device.type != "cpu":
            destination.record_stream(self._queue)
        if not self._buffers:
            destination.copy_(source, non_blocking=True)
            return
        into = destination.view(-1).view(torch.uint8)
        for offset in range(0, source.nbytes, BUFFER_BYTES):
            if self._closed:
                raise closed_error(self.name)
            number, self._next = self._next, (self._next + 1) % len(self._buffers)
            if self._last_use[number] is not None:
                self._last_use[number].synchronize()
            size, buffer = min(BUFFER_BYTES, source.nbytes - offset), self._buffers[number]
            ctypes.memmove(buffer.data_ptr(), source.data_ptr() + offset, size)  # lets other threads run
            into[offset : offset + size].copy_(buffer[:size], non_blocking=True)
            self._last_use[number] = self._cards.Event(enable_timing=True)
            self._last_use[number].record(self._queue)

    def _stop(self) -> None:
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
