"""When a card would have done what it was given: queues of work with known durations, and links between them.

Nothing is computed here. What is issued at a moment can only change what comes after it, so everything before the
present is settled, and a queue is played no further than somebody asks: up to the present, or up to the event that the
host waits for, while it issues nothing. So a small copy may still hold up a large one that is on the link.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.common.clock import OwnClock
from engine.common.errors import EngineError
from engine.devices.device import Event
from engine.devices.failures import fresh


class TimedEvent:
    """The end of one unit of work (see `engine.devices.device.Event`): known as soon as it has been played."""

    __slots__ = ("_timeline", "end_s", "issued_failure", "start_s")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.issued_failure: EngineError | None = None
        self.start_s = 0.0
        self.end_s: float | None = None

    @classmethod
    def failed(cls, timeline: Timeline, error: EngineError) -> TimedEvent:
        """Of work that has failed, or will never run."""
        event, now_s = cls(timeline), timeline.clock.now()
        event.issued_failure = error
        event.settle(now_s, now_s)
        return event

    def done(self) -> bool:
        with self._timeline.clock.stopped():
            self._timeline.play_to_present()
            return self.end_s is not None and self.end_s <= self._timeline.clock.now()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`.  The clock jumps to the end."""
        clock = self._timeline.clock
        with clock.stopped():
            self._timeline.play_until(self)
        assert self.end_s is not None
        if timeout_s is not None and self.end_s > clock.now() + timeout_s:
            clock.advance(timeout_s)
            return False
        clock.advance_to(self.end_s)
        if self.issued_failure is not None:
            raise fresh(self.issued_failure)
        return True

    def cancel(self) -> bool:
        """See `Event.cancel`: as on a card, what was issued is done."""
        return False

    @property
    def failure(self) -> EngineError | None:
        return self.issued_failure

    @property
    def started_s(self) -> float:
        self._require_done()
        return self.start_s

    @property
    def ended_s(self) -> float:
        self._require_done()
        assert self.end_s is not None
        return self.end_s

    def settle(self, start_s: float, end_s: float) -> None:
        """Called by the timeline."""
        self.start_s, self.end_s = start_s, end_s

    def _require_done(self) -> None:
        if not self.done():
            raise RuntimeError("the event is not done")


@dataclass
class Wire:
    """One direction of a link: one copy at a time, and small urgent ones overtake.

    Attributes:
        urgent_until_s: when the last urgent copy is through.
        big: the queue whose large copy is under way.
    """

    bytes_per_s: float
    latency_s: float
    urgent_until_s: float = 0.0
    big: Queue | None = None

    def needed_s(self, nbytes: int) -> float:
        """Seconds of one copy alone."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(slots=True)
class _Item:
    event: TimedEvent
    issued_s: float
    after: Sequence[TimedEvent]
    seconds: float
    wire: Wire | None = None
    is_urgent: bool = False
    on_end: Callable[[float, float], None] | None = None


@dataclass(eq=False)
class Queue:
    """What one stream was given and has not been played.

    Attributes:
        free_s: end of what was played last.
        end_s: of the large copy under way.
    """

    items: deque[_Item] = field(default_factory=deque)
    after: list[TimedEvent] = field(default_factory=list)
    free_s: float = 0.0
    end_s: float | None = None


class Timeline:
    """The queues of all cards that share a clock.  Thread-safe."""

    def __init__(self, clock: OwnClock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self._queues: list[Queue] = []

    def new_queue(self) -> Queue:
        """For one stream."""
        queue = Queue()
        with self.lock:
            self._queues.append(queue)
        return queue

    def close(self, queue: Queue) -> None:
        """Plays what the queue holds, and forgets it."""
        with self.lock:
            while queue.items:
                self.play_until(queue.items[-1].event)
            if queue in self._queues:
                self._queues.remove(queue)

    def issue(
        self,
        queue: Queue,
        seconds: float = 0.0,
        *,
        wire: Wire | None = None,
        is_urgent: bool = False,
        on_end: Callable[[float, float], None] | None = None,
    ) -> TimedEvent:
        """Adds work to a queue now.

        Args:
            seconds: how long it takes, once what is before it in the queue is done and the wire is free.
            wire: what it needs, if it is a copy over a link.
            on_end: called with its start and end once they are known.
        """
        event = TimedEvent(self)
        with self.lock:
            self.play_to_present()
            after, queue.after = queue.after, []
            queue.items.append(_Item(event, self.clock.now(), after, seconds, wire, is_urgent, on_end))
        return event

    def wait(self, queue: Queue, event: Event) -> None:
        """What is issued to the queue from now on begins after `event`."""
        with self.lock:
            if isinstance(event, TimedEvent):
                queue.after.append(event)
                return
        event.wait()  # of a device that computes while its caller waits, so that it is done

    def play_to_present(self) -> None:
        """Settles what begins or ends before now."""
        with self.lock:
            self._play(self.clock.now(), None)

    def play_until(self, event: TimedEvent) -> None:
        """Settles what is needed to know when an event is done."""
        with self.lock:
            self._play(None, event)
            if event.end_s is None:
                raise RuntimeError("work waits for an event that nothing leads to")

    def _play(self, until_s: float | None, event: TimedEvent | None) -> None:
        while event is None or event.end_s is None:
            found = min(filter(None, map(self._next, self._queues)), key=lambda step: step[:2], default=None)
            if found is None or (until_s is not None and found[0] > until_s):
                return
            moment_s, rank, queue = found
            if rank == 0:
                self._end(queue, moment_s)
            else:
                self._begin(queue, moment_s)

    def _next(self, queue: Queue) -> tuple[float, int, Queue] | None:
        """(moment, rank among others of that moment, queue) of what happens next in a queue, as far as is known."""
        if queue.end_s is not None:
            return queue.end_s, 0, queue
        if not queue.items:
            return None
        item = queue.items[0]
        start_s = max(item.issued_s, queue.free_s)
        for event in item.after:
            if event.end_s is None:
                return None
            start_s = max(start_s, event.end_s)
        if item.wire is not None:
            start_s = max(start_s, item.wire.urgent_until_s)
            if not item.is_urgent and item.wire.big is not None:
                return None
        return start_s, 1 if item.is_urgent else 2, queue

    def _begin(self, queue: Queue, start_s: float) -> None:
        item = queue.items[0]
        end_s, wire = start_s + item.seconds, item.wire
        if wire is not None and not item.is_urgent:
            wire.big, queue.end_s = queue, end_s
            item.event.start_s = start_s
            return
        if wire is not None:
            wire.urgent_until_s = end_s
            if wire.big is not None and wire.big.end_s is not None:
                wire.big.end_s += item.seconds
        self._settle(queue, start_s, end_s)

    def _end(self, queue: Queue, end_s: float) -> None:
        wire = queue.items[0].wire
        assert wire is not None
        wire.big = queue.end_s = None
        self._settle(queue, queue.items[0].event.start_s, end_s)

    def _settle(self, queue: Queue, start_s: float, end_s: float) -> None:
        item = queue.items.popleft()
        queue.free_s = end_s
        if item.on_end is not None:
            item.on_end(start_s, end_s)
        item.event.settle(start_s, end_s)
