"""A graphics card through torch, whoever made it: streams, whose times are converted to the host's clock, and how it is
opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import ROLES, Capture, CopyLog, Device, Direction, Event, Stream
from engine.devices.failures import as_engine_error, closed_error, fresh, is_out_of_memory
from engine.devices.host_memory import HostMemory, aligned
from engine.devices.memory_budget import MemoryBudget, MemoryWatch, Room

_ANCHOR_AGE_S = 10.0
"""Cards report elapsed times as float32 milliseconds, which lose microsecond precision after minutes."""


Anchor = tuple[Any, float]
"""An event of torch's, and its time on the host's clock."""


class CardClock:
    """Anchors for one card, accurate to a few microseconds, on a stream without other work."""

    def __init__(self, cards: Any, device: torch.device) -> None:
        self._cards = cards
        self._stream = cards.Stream(device, priority=-1)
        self._lock = threading.Lock()
        self._anchor = self._take()

    def anchor(self) -> Anchor:
        """An anchor recent enough for work submitted now.

        Raises:
            RuntimeError: the card has failed.
        """
        with self._lock:
            if time.perf_counter() - self._anchor[1] > _ANCHOR_AGE_S:
                self._anchor = self._take()
            return self._anchor

    def _take(self) -> Anchor:
        event = self._cards.Event(enable_timing=True)
        self._stream.synchronize()
        before_s = time.perf_counter()
        event.record(self._stream)
        event.synchronize()
        return event, (before_s + time.perf_counter()) / 2


_POLL_S = 50e-6

Copied = tuple[Direction, int, tuple[torch.Tensor, torch.Tensor]]
"""Direction, bytes, and the tensors to keep alive until the copy has ended: torch does not know that it uses them."""


class CardEvent:
    """See `engine.devices.device.Event`."""

    def __init__(self, stream: str, copy_log: CopyLog, copied: Copied | None) -> None:
        self._stream, self._copy_log, self._copied = stream, copy_log, copied
        self._lock = threading.Lock()
        self._marks: tuple[Anchor, Any, Any] | None = None
        self._placed: threading.Event | None = None
        self._span: tuple[float, float] | None = None
        self._failure: EngineError | None = None

    def later(self) -> None:
        """Called by the stream at first if the work does not go into its queue at once."""
        self._placed = threading.Event()

    def recorded(self, anchor: Anchor, start: Any, end: Any) -> None:
        """Called by the stream: start and end of the work are in its queue."""
        self._marks = anchor, start, end
        if self._placed is not None:
            self._placed.set()

    def fail(self, error: EngineError) -> None:
        """Called by the stream: the work failed, or will not run."""
        with self._lock:
            now_s = time.perf_counter()
            self._failure, self._span, self._copied = error, (now_s, now_s), None
        if self._placed is not None:
            self._placed.set()

    def placed(self) -> None:
        """Blocks until the work is in the card's queue, or has failed before."""
        if self._placed is not None:
            self._placed.wait()

    @property
    def end(self) -> Any | None:
        """The event that other streams of cards wait for; None if the work failed before it was queued."""
        return None if self._marks is None else self._marks[2]

    def done(self) -> bool:
        if self._span is not None:
            return True
        if self._marks is None:
            return False
        try:
            if not self._marks[2].query():
                return False
            self._settle()
        except RuntimeError as error:
            self.fail(as_engine_error(error, self._stream))
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._span is None and timeout_s is not None:
            give_up_s = time.perf_counter() + timeout_s
            while not self.done():
                if (now_s := time.perf_counter()) >= give_up_s:
                    return False
                time.sleep(min(give_up_s - now_s, _POLL_S))
        elif self._span is None:
            self.placed()
            try:
                if self._marks is not None:
                    self._marks[2].synchronize()
                    self._settle()
            except RuntimeError as error:
                self.fail(as_engine_error(error, self._stream))
        if self._failure is not None:
            raise fresh(self._failure)
        return True

    @property
    def failure(self) -> EngineError | None:
        return self._failure

    @property
    def started_s(self) -> float:
        return self._done_span()[0]

    @property
    def ended_s(self) -> float:
        return self._done_span()[1]

    def _done_span(self) -> tuple[float, float]:
        if not self.done() or self._span is None:
            raise RuntimeError("the event is not done")
        return self._span

    def _settle(self) -> None:
        """Reads the time of a finished event, once, and logs the copy."""
        with self._lock:
            if self._span is not None or self._marks is None:
                return
            (anchor, at_s), start, end = self._marks
            started_s = at_s + float(anchor.elapsed_time(start)) / 1e3
            ended_s = max(started_s, at_s + float(anchor.elapsed_time(end)) / 1e3)
            if self._copied is not None:
                direction, nbytes, _ = self._copied
                self._copied = None
                self._copy_log.ended(self._stream, direction, nbytes, started_s, ended_s)
            self._span = started_s, ended_s


class CardStream(Stream):
    """See `engine.devices.device.Stream`.  Work is called immediately; its launches go to this stream."""

    def __init__(self, name: str, stream: Any, cards: Any, clock: CardClock, copy_log: CopyLog) -> None:
        super().__init__(name, copy_log)
        self._cards, self._queue, self._clock = cards, stream, clock
        self._turn = threading.RLock()
        # Copies possibly without a waiter: they keep their tensors alive, and are logged once they are seen to be done.
        self._in_flight: deque[CardEvent] = deque()

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None) -> Event:
        """See `Stream.copy`.  Asynchronous to the host only from and to pinned memory."""
        taken = direction or direction_of(destination, source)

        def move() -> None:
            destination.copy_(source, non_blocking=True)
            for tensor in (destination, source):
                if tensor.device.type != "cpu":
                    tensor.record_stream(self._queue)

        with torch.inference_mode():
            return self._run(move, (taken, source.nbytes, (destination, source)))

    def wait(self, event: Event) -> None:
        """See `Stream.wait`.  Blocks on events of other devices, and until a card's work is in its queue."""
        if isinstance(event, CardEvent):
            event.placed()
        with self._turn:
            self._require_open()
            if self._failure is not None:
                return
            try:
                if isinstance(event, CardEvent) and event.failure is None and event.end is not None:
                    self._queue.wait_event(event.end)
                else:
                    event.wait()
            except (EngineError, RuntimeError) as error:
                self._failure = as_engine_error(error, self.name)

    def record(self) -> Event:
        return self._run(None)

    def synchronize(self) -> None:
        super().synchronize()
        self._forget_ended()

    def recover(self) -> None:
        """See `Stream.recover`.  After a hardware fault only a new process helps."""
        with self._turn:
            self._require_open()
            try:
                self._queue.synchronize()
            except RuntimeError as error:
                raise as_engine_error(error, self.name) from None
            self._forget_ended()
            self._failure = None

    def close(self) -> None:
        with self._turn:
            if self._closed:
                return
            self._closed = True
        self._stop()
        with self._turn:
            with contextlib.suppress(RuntimeError):  # the card is lost, including work in flight
                self._queue.synchronize()
            self._forget_ended()
            self._in_flight.clear()

    def _run(self, work: Callable[[], object] | None, copied: Copied | None = None) -> Event:
        with self._turn:
            self._require_open()
            self._forget_ended()
            event = CardEvent(self.name, self._copy_log, copied)
            self._place(event, work, is_copy=copied is not None)
            return event

    def _place(self, event: CardEvent, work: Callable[[], object] | None, *, is_copy: bool) -> None:
        """Calls the work, between the event's marks."""
        if self._failure is not None:
            event.fail(self._failure)
            return
        try:
            anchor = self._clock.anchor()
            start = end = self._cards.Event(enable_timing=True)
            start.record(self._queue)
            if work is not None:
                with self._cards.stream(self._queue):
                    work()
                end = self._cards.Event(enable_timing=True)
                end.record(self._queue)
        except Exception as error:
            self._failure = as_engine_error(error, self.name)
            event.fail(self._failure)
            return
        event.recorded(anchor, start, end)
        if is_copy:
            self._in_flight.append(event)

    def _stop(self) -> None:
        """Ends what a subclass runs, before nothing is in flight any more."""

    def _forget_ended(self) -> None:
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()


def direction_of(destination: torch.Tensor, source: torch.Tensor) -> Direction:
    """Which way a copy between these goes."""
    into, out_of = (tensor.device.type != "cpu" for tensor in (destination, source))
    if into == out_of:
        return Direction.D2D
    return Direction.H2D if into else Direction.D2H


BUFFERS, BUFFER_BYTES = 4, 2 * 2**20
WORTH_BYTES = 2**16
"""Drivers take copies up to this size from their caller without waiting."""


class RelayedStream(CardStream):
    """Whose copies do not hold up who submits them.

    A driver copies from memory that is not pinned while its caller waits: experts in a mapped file or beyond the limit
    of pinned memory would stop the thread that decodes, which may hold a cache's lock.  So a thread carries them
    through a few pinned buffers in turn, filling one while the card reads others, or without any as the driver does.
    What is submitted meanwhile queues behind them.
    """

    def __init__(self, name: str, stream: Any, cards: Any, clock: CardClock, copy_log: CopyLog) -> None:
        super().__init__(name, stream, cards, clock, copy_log)
        self._buffers: list[torch.Tensor] | None = None
        self._last_use: list[Any] = [None] * BUFFERS
        self._next = 0
        self._changed = threading.Condition(self._turn)
        # What is not yet in the card's queue, with its event unless it is a wait.  The first one is under way.
        self._queued: deque[tuple[CardEvent | None, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the card copies from a tensor without its caller waiting."""
        return tensor.is_pinned()

    def _pinned(self, nbytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # there is no driver, or it has a limit
            return None

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


_log = logging.getLogger(__name__)

HEADROOM_BYTES = 2**30
"""Bytes left to the driver, torch's workspaces and the desktop."""
_WITHOUT_DISPLAY_BYTES = 3 * 2**28
_DESKTOP_BYTES = 2**31
_WORTH_SPILLED_BYTES = 2**28
"""Less than this in RAM is no sign that the system moved it there."""


@dataclass(frozen=True)
class CardKind:
    """What differs between kinds of cards.

    Attributes:
        name: torch's for devices of the kind, and in `--device`.
        torch: torch's module of the kind, `torch.cuda` or `torch.xpu`, which have the same names for the same things.
        host_memory: memory that a card's copies are fast from.
        identity: of the card with this index, its driver and its link: what measured times depend on.
        captures: starts captures of graphs on a card; None if decode steps are not captured.
        shows_desktop: whether the card of this index drives a display; None if that is not known.
        in_ram: returns a function that counts bytes of this process that belong on the card of this index, or may be
            read by it, and lie in RAM; None if the system cannot move them there, or does not say.
        is_built: whether the installed torch knows the kind.
        variables: of the environment, by which cards are hidden from programs.
        opens: the card of an index with a memory budget, where that is done in another way.
        is_automatic: whether models run on such cards unless told otherwise.
    """

    name: str
    torch: Any
    host_memory: Callable[[torch.device], HostMemory]
    identity: Callable[[int], str]
    captures: Callable[[torch.device], Callable[[], Capture]] | None = None
    shows_desktop: Callable[[int], bool | None] = lambda _index: None
    in_ram: Callable[[int], Callable[[], int | None] | None] = lambda _index: None
    is_built: Callable[[], bool] = lambda: True
    variables: tuple[str, ...] = ()
    opens: Callable[[CardKind, int, int | None], Device] | None = None
    is_automatic: bool = True

    def count(self) -> int:
        """Number of cards that torch can use."""
        try:
            return int(self.torch.device_count()) if self.torch.is_available() else 0
        except RuntimeError as error:  # a driver that breaks when it is asked
            _log.warning("torch cannot count the cards of the kind %s: %s", self.name, error)
            return 0

    def hidden(self) -> str:
        """Why torch sees no card, as a sentence, if a variable of the environment decides that; else empty."""
        if not self.is_built() or self.count():
            return ""
        said = next(((name, os.environ[name]) for name in self.variables if name in os.environ), None)
        if said is None:
            return ""
        return (
            f"The variable {said[0]} is {said[1]!r}, which shows this program no graphics card: remove it to use one."
        )


def reserve_bytes(total: int, free: int, *, shows_desktop: bool | None) -> int:
    """Bytes of a card to leave to its driver, torch's workspaces and the desktop.

    A desktop that holds much at the start will want more: a quarter of it, up to half a gibibyte, comes on top.

    Args:
        total, free: bytes of the card before anything is allocated.
        shows_desktop: whether it drives a display; None is taken for yes.
    """
    if shows_desktop is False:
        return min(_WITHOUT_DISPLAY_BYTES, total // 8)
    return HEADROOM_BYTES + min(max(0, total - free), _DESKTOP_BYTES) // 4


def hard_fraction(budget: int, total: int, reserve: int = HEADROOM_BYTES) -> float:
    """The part of a card's memory beyond which torch refuses to allocate, so that nothing spills into RAM: the budget,
    and half of what is left to others, for torch's own workspaces."""
    return min(1.0, (budget + reserve // 2) / max(total, 1))


def open_card(kind: CardKind, index: int = 0, vram_bytes: int | None = None) -> Device:
    """Opens a card.

    Args:
        vram_bytes: memory budget; None: all free memory except `reserve_bytes`.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if there is no such card, or it does not respond.
    """
    cards = kind.torch
    if index >= (count := kind.count()):
        what = f"no graphics card number {index}" if count else "no graphics card that torch can use"
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE,
            kind.hidden() or f"This machine has {what}: use cpu, or run `switchyard doctor`.",
        )
    if kind.opens is not None:
        return kind.opens(kind, index, vram_bytes)
    name = f"{kind.name}:{index}"
    place = torch.device(kind.name, index)
    try:
        cards.empty_cache()  # what torch still holds of a model that is gone is free
        free, total = cards.mem_get_info(place)
        clock = CardClock(cards, place)
        # Weight copies may take long; activations need a stream of higher priority.
        queues = (
            cards.current_stream(place),
            cards.Stream(place, priority=0),
            cards.Stream(place, priority=0),
            cards.Stream(place, priority=-1),
        )
        new_capture = None if kind.captures is None else kind.captures(place)
    except RuntimeError as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        why = f"Graphics card {name} does not respond ({text}): restart the computer or use --device cpu."
        if is_out_of_memory(error):
            why = f"Graphics card {name} has no memory left: close other programs that use it, or use --device cpu."
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, why) from error
    reserve = reserve_bytes(total, free, shows_desktop=kind.shows_desktop(index))
    usable = max(0, free - reserve)
    budget = usable if vram_bytes is None else min(usable, vram_bytes)

    def enforce(nbytes: int) -> None:
        cards.set_per_process_memory_fraction(hard_fraction(nbytes, total, reserve), place)

    enforce(budget)
    log = CopyLog()
    kinds = (CardStream, RelayedStream, CardStream, CardStream)
    streams = tuple(
        made(f"{name} {role}", queue, cards, clock, log) for made, role, queue in zip(kinds, ROLES, queues, strict=True)
    )
    host = kind.host_memory(place)

    def allocate(nbytes: int) -> torch.Tensor:
        memory = aligned(nbytes, place)
        # torch may return memory that its current stream still uses, while other streams will write to it.
        cards.current_stream(place).synchronize()
        return memory

    count_in_ram = kind.in_ram(index)
    at_start = (count_in_ram() or 0) if count_in_ram is not None else 0

    def room() -> Room:
        in_ram = None if count_in_ram is None else count_in_ram()
        # Pinned memory counts as the card's, but is meant to be in RAM.
        spilled = 0 if in_ram is None else in_ram - at_start - host.pinned_bytes
        spilled = spilled if spilled > _WORTH_SPILLED_BYTES else 0
        free, _ = cards.mem_get_info(place)
        if spilled or free < reserve // 4:  # what torch keeps for later is of use to others now
            cards.empty_cache()
            free, _ = cards.mem_get_info(place)
        return Room(int(free), spilled)

    def close() -> None:
        for stream in streams:
            stream.close()
        host.close()

    memory = MemoryBudget(name, budget, allocate)
    return Device(
        name=name,
        torch_device=place,
        memory=memory,
        host_memory=host,
        streams=streams,
        copy_log=log,
        on_close=close,
        compute_follows_caller=True,
        new_capture=new_capture,
        watch=MemoryWatch(memory, room, reserve, enforce),
        identity=kind.identity(index),
    )
