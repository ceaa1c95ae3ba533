"""A stream with its own thread: in order within, concurrent with others, as on a graphics card.

A waiter whose work has not started runs it itself: a real card needs no wake-ups, and here they cost more than most
submitted work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.devices.device import CopyLog, Direction, Event, Stream
from engine.devices.failures import as_engine_error, closed_error
from engine.devices.host_event import HostEvent, sharpen_timers, sleep_until
from engine.devices.link import ClosingError

_LOOK_S = 0.05
"""Interval at which a stream that waits for another's event checks whether it is being closed."""

Span = tuple[float, float]
Carrier = Callable[[torch.Tensor, torch.Tensor, Direction | None, float], tuple[Direction, Span]]
"""Copies: (destination, source, direction if the caller gave one, ready at) -> (direction, span)."""


@dataclass(frozen=True, slots=True)
class _Item:
    """One entry of the queue.

    Attributes:
        run: runs the work, given the time when it became ready; returns its span.
        recovers: whether it clears a failure.
    """

    event: HostEvent
    run: Callable[[float], Span]
    submitted_s: float
    recovers: bool = False


class ThreadedStream(Stream):
    """See `engine.devices.device.Stream`.

    Args:
        name: also the thread's name.
        carrier: runs the copies.
        slowdown: factor on the duration of submitted work.
        closing: set by the device when it closes: copies and waits end then.
    """

    def __init__(
        self, name: str, copy_log: CopyLog, carrier: Carrier, *, closing: threading.Event, slowdown: float = 1.0
    ) -> None:
        super().__init__(name, copy_log)
        self._carrier = carrier
        self._closing = closing
        self._slowdown = slowdown
        self._queue: deque[_Item] = deque()
        self._turn = threading.Condition(threading.Lock())
        self._free_s = 0.0
        self.performer: int | None = None
        """The thread currently running an item: this stream's own, or a waiter."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> Event:
        """See `Stream.submit`.  `work` runs with the caller's gradient and inference mode."""
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run(_ready_s: float) -> Span:
            started_s = time.perf_counter()
            if inference:
                with torch.inference_mode():
                    work()
            else:
                with torch.set_grad_enabled(gradients):
                    work()
            ended_s = time.perf_counter()
            if self._slowdown > 1:
                ended_s = started_s + (ended_s - started_s) * self._slowdown
                if not sleep_until(ended_s, self._closing.is_set):
                    raise ClosingError
            return started_s, ended_s

        return self._enqueue(run)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None) -> Event:

        def run(ready_s: float) -> Span:
            with torch.inference_mode():
                taken, span = self._carrier(destination, source, direction, ready_s)
            self._copy_log.ended(self.name, taken, source.nbytes, *span)
            return span

        return self._enqueue(run)

    def wait(self, event: Event) -> None:

        def run(ready_s: float) -> Span:
            if isinstance(event, HostEvent):
                event.help()
            while not event.wait(_LOOK_S):
                if self._closing.is_set():
                    raise ClosingError
            ended_s = max(ready_s, event.ended_s)
            return ended_s, ended_s

        if event.done() and event.failure is None:
            self._require_open()
        else:
            self._enqueue(run, is_wait=True)

    def record(self) -> Event:
        return self._enqueue(lambda ready_s: (ready_s, ready_s))

    def recover(self) -> None:
        self._enqueue(lambda ready_s: (ready_s, ready_s), recovers=True).wait()

    def close(self) -> None:
        """See `Stream.close`.  Set `closing` first, to interrupt running work."""
        with self._turn:
            self._closed = True
            self._turn.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def help_until(self, event: HostEvent) -> None:
        """Runs work on the calling thread until `event` is done or another thread runs it: saves waking a thread."""
        sharpen_timers()
        while not event.done():
            item = self._next_item()
            if item is None:
                return
            self._perform(item)
            del item

    def _enqueue(self, run: Callable[[float], Span], *, recovers: bool = False, is_wait: bool = False) -> HostEvent:
        event = HostEvent(self.name, None if is_wait else self)
        item = _Item(event, run, time.perf_counter(), recovers)
        with self._turn:
            self._require_open()
            self._queue.append(item)
            if self.performer is None:
                self._turn.notify()
        return event

    def _serve(self) -> None:
        sharpen_timers()
        while True:
            with self._turn:
                while self.performer is not None or not self._queue:
                    if self._closed and self.performer is None:
                        return
                    self._turn.wait()
            item = self._next_item()
            if item is not None:
                self._perform(item)
            # While waiting for the next item, do not keep the last one's tensors alive.
            del item

    def _next_item(self) -> _Item | None:
        """The first item, if there is one and no thread runs another; the calling thread must run it."""
        with self._turn:
            if self.performer is not None or not self._queue:
                return None
            self.performer = threading.get_ident()
            return self._queue.popleft()

    def _perform(self, item: _Item) -> None:
        try:
            if item.event.claim():
                self._free_s = self._do(item, self._free_s)
        finally:
            with self._turn:
                self.performer = None
                if self._queue or self._closed:
                    self._turn.notify()

    def _do(self, item: _Item, free_s: float) -> float:
        """Runs one item; returns when the stream was free again."""
        if self._closed or self._closing.is_set():
            item.event.fail(closed_error(self.name))
            return free_s
        if item.recovers:
            self._failure = None
        if self._failure is None:
            try:
                started_s, ended_s = item.run(max(item.submitted_s, free_s))
            except ClosingError:
                self._failure = closed_error(self.name)
            except BaseException as error:  # whatever it is, waiters must get it
                self._failure = as_engine_error(error, self.name)
            else:
                item.event.finish(started_s, ended_s)
                return ended_s
        item.event.fail(self._failure)
        return time.perf_counter()
