"""When a card would have done what it was given: queues of work, and links between them.

What is issued at a moment can only change what comes after it, so everything before the present is settled, and a queue
is played no further than somebody asks: up to the present, or up to the event that the host waits for, while it issues
nothing. So a small copy may still hold up a large one that is on the link.

Work whose duration is only known once it has run is put off until an event is asked for that needs it.  Whoever asks
meanwhile waits until it has been done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.common.clock import OwnClock
from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import Event
from engine.devices.failures import as_engine_error, closed_error, fresh

Work = Callable[[], float]
"""Does what was put off; returns the seconds that it takes."""


class TimedEvent:
    """The end of one unit of work (see `engine.devices.device.Event`): known as soon as it has been played."""

    __slots__ = ("_timeline", "end_s", "failure", "queue", "start_s")

    def __init__(self, timeline: Timeline, queue: Queue) -> None:
        self._timeline, self.queue = timeline, queue
        self.failure: EngineError | None = None
        self.start_s = 0.0
        self.end_s: float | None = None

    @classmethod
    def failed(cls, timeline: Timeline, queue: Queue, error: EngineError) -> TimedEvent:
        """Of work that has failed, or will never run."""
        event, now_s = cls(timeline, queue), timeline.clock.now()
        event.failure = error
        event.settle(now_s, now_s)
        return event

    def done(self) -> bool:
        with self._timeline.clock.stopped():
            self._timeline.play_until(self, self._timeline.clock.now())
            return self.end_s is not None and self.end_s <= self._timeline.clock.now()

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `Event.wait`.  The clock jumps to the end."""
        clock = self._timeline.clock
        with clock.stopped():
            until_s = None if timeout_s is None else clock.now() + timeout_s
            self._timeline.play_until(self, until_s)
        if self.end_s is None or (until_s is not None and self.end_s > until_s):
            assert until_s is not None
            clock.advance_to(until_s)
            return False
        clock.advance_to(self.end_s)
        if self.failure is not None:
            raise fresh(self.failure)
        return True

    @property
    def started_s(self) -> float:
        return self._done_s()[0]

    @property
    def ended_s(self) -> float:
        return self._done_s()[1]

    def settle(self, start_s: float, end_s: float) -> None:
        """Called by the timeline."""
        self.start_s, self.end_s = start_s, end_s

    def _done_s(self) -> tuple[float, float]:
        if not self.done() or self.end_s is None:
            raise RuntimeError("the event is not done")
        return self.start_s, self.end_s


@dataclass
class Wire:
    """One direction of a link: one copy at a time, and small urgent ones overtake.

    `*_until_s`: when the last of each is through; `big`: the queue whose large copy is under way.
    """

    bytes_per_s: float
    latency_s: float
    urgent_until_s: float = 0.0
    big_until_s: float = 0.0
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
    work: Work | None = None
    on_end: Callable[[float, float], None] | None = None

    @property
    def is_put_off(self) -> bool:
        return self.work is not None and self.wire is None


@dataclass(eq=False)
class Queue:
    """What one stream was given and has not been played.

    Attributes:
        free_s: end of what was played last.
        end_s: of the large copy under way.
        is_running: whether what was put off is being done, the first of the items.
        failure: of what was put off: nothing more is done until it is cleared.
    """

    name: str = ""
    items: deque[_Item] = field(default_factory=deque)
    after: list[TimedEvent] = field(default_factory=list)
    free_s: float = 0.0
    end_s: float | None = None
    is_running: bool = False
    failure: EngineError | None = None


class Timeline:
    """The queues of all cards that share a clock.  Thread-safe."""

    def __init__(self, clock: OwnClock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self._queues: list[Queue] = []

    def hurries(self) -> bool:
        """Whether work that could be put off is done at once.  Tests draw it, for any order that a card may choose."""
        return False

    def new_queue(self, name: str = "") -> Queue:
        """For one stream."""
        queue = Queue(name)
        with self.lock:
            self._queues.append(queue)
        return queue

    def close(self, queue: Queue) -> None:
        """Plays what the queue holds, and forgets it: what was put off fails."""
        with self.lock:
            queue.failure = queue.failure or closed_error(queue.name)
            while queue.items and not queue.is_running:
                self.play_until(queue.items[-1].event)
            if queue in self._queues and not queue.items:
                self._queues.remove(queue)

    def issue(
        self,
        queue: Queue,
        seconds: float = 0.0,
        *,
        wire: Wire | None = None,
        is_urgent: bool = False,
        work: Work | None = None,
        on_end: Callable[[float, float], None] | None = None,
    ) -> TimedEvent:
        """Adds work to a queue now.

        Args:
            seconds: how long it takes, once what is before it in the queue is done and the wire is free.
            wire: what it needs, if it is a copy over a link.
            work: what is still to be done for it; without a wire its result counts as seconds.
            on_end: called with its start and end once they are known.
        """
        event = TimedEvent(self, queue)
        with self.lock:
            self._play(self.clock.now(), None)
            after, queue.after = queue.after, []
            queue.items.append(_Item(event, self.clock.now(), after, seconds, wire, is_urgent, work, on_end))
        return event

    def wait(self, queue: Queue, event: Event) -> None:
        """What is issued to the queue from now on begins after `event`."""
        with self.lock:
            if isinstance(event, TimedEvent):
                queue.after.append(event)
                return
        event.wait()  # of a device that computes while its caller waits, so that it is done

    def play_until(self, event: TimedEvent, until_s: float | None = None) -> None:
        """Settles what is needed to know when an event is done, and does what was put off for it.

        Args:
            until_s: what begins later may be left out.

        Raises:
            EngineError: the event is behind what the calling thread is doing.
        """
        with self.lock:
            while event.end_s is None:
                if not any(item.is_put_off for queue in self._queues for item in queue.items):
                    self._play(until_s, event)
                    assert event.end_s is not None or until_s is not None
                    return
                needed = self._needed(event.queue)
                due = next((queue for queue in needed if self._is_due(queue, until_s)), None)
                if due is None:
                    if not self._play_one(until_s, needed):
                        return
                elif not due.is_running:
                    self._do(due)
                elif until_s is not None:
                    return
                else:
                    raise EngineError(
                        ErrorCode.INTERNAL,
                        f"Work on {event.queue.name} waits for what is queued behind it: report this.",
                    )

    def _needed(self, queue: Queue) -> list[Queue]:
        """The queue and those that its first item waits for, theirs, and so on."""
        needed = [queue]
        for each in needed:
            if not each.items or self._failure_of(each) is not None:
                continue
            item = each.items[0]
            waits = [one.queue for one in item.after if one.end_s is None]
            if item.wire is not None and item.wire.big is not None:
                waits.append(item.wire.big)
            needed += [one for one in dict.fromkeys(waits) if one not in needed]
        return needed

    def _is_due(self, queue: Queue, until_s: float | None) -> bool:
        if queue.is_running:
            return True
        if not queue.items or not queue.items[0].is_put_off or self._failure_of(queue) is not None:
            return False
        start_s = self._start_s(queue)
        return start_s is not None and (until_s is None or start_s <= until_s)

    @staticmethod
    def _failure_of(queue: Queue) -> EngineError | None:
        """Why the first item will not be done."""
        if queue.items[0].work is None:
            return None
        return queue.failure or next((one.failure for one in queue.items[0].after if one.failure), None)

    def _do(self, queue: Queue) -> None:
        item, failure, seconds = queue.items[0], None, 0.0
        assert item.work is not None
        queue.is_running = True
        try:
            seconds = item.work()
        except BaseException as error:  # whatever it is, waiters must get it
            failure = as_engine_error(error, queue.name)
        queue.is_running = False
        start_s = self._start_s(queue)
        assert start_s is not None
        if failure is not None:
            self._fail(queue, failure)
        else:
            self._settle(queue, start_s, start_s + max(item.seconds, seconds))

    def _fail(self, queue: Queue, failure: EngineError) -> None:
        """The first item of the queue fails."""
        queue.failure = queue.failure or failure
        item, now_s = queue.items.popleft(), self.clock.now()
        item.event.failure = queue.failure
        item.event.settle(now_s, now_s)

    def _play(self, until_s: float | None, event: TimedEvent | None) -> None:
        while (event is None or event.end_s is None) and self._play_one(until_s, self._queues):
            pass

    def _play_one(self, until_s: float | None, queues: Sequence[Queue]) -> bool:
        """What happens next in these queues, whatever has to be done first left out; whether there was anything."""
        found = min(filter(None, map(self._next, queues)), key=lambda step: step[:2], default=None)
        if found is None or (until_s is not None and found[0] > until_s):
            return False
        moment_s, rank, queue = found
        if rank == 0:
            self._end(queue, moment_s)
        else:
            self._begin(queue, moment_s)
        return True

    def _next(self, queue: Queue) -> tuple[float, int, Queue] | None:
        """(moment, rank among others of that moment, queue) of what happens next in a queue, as far as is known."""
        if queue.end_s is not None:
            return queue.end_s, 0, queue
        if not queue.items or queue.is_running:
            return None
        item = queue.items[0]
        if self._failure_of(queue) is not None:
            return item.issued_s, 1, queue
        start_s = self._start_s(queue)
        if start_s is None or item.is_put_off:
            return None
        if item.wire is not None:
            start_s = max(start_s, item.wire.urgent_until_s)
            if not item.is_urgent:
                if item.wire.big is not None:
                    return None
                start_s = max(start_s, item.wire.big_until_s)
        return start_s, 1 if item.is_urgent else 2, queue

    @staticmethod
    def _start_s(queue: Queue) -> float | None:
        """When the first item could begin but for its wire; None if that is not known yet."""
        item = queue.items[0]
        start_s = max(item.issued_s, queue.free_s)
        for event in item.after:
            if event.end_s is None:
                return None
            start_s = max(start_s, event.end_s)
        return start_s

    def _begin(self, queue: Queue, start_s: float) -> None:
        item = queue.items[0]
        if (failure := self._failure_of(queue)) is not None:
            self._fail(queue, failure)
            return
        end_s, wire = start_s + item.seconds, item.wire
        if wire is not None and not item.is_urgent:
            wire.big, queue.end_s = queue, end_s
            item.event.start_s = start_s
            return
        if wire is not None:
            wire.urgent_until_s = end_s
            if wire.big is not None and wire.big.end_s is not None:
                wire.big.end_s += item.seconds
        self._arrive(queue, start_s, end_s)

    def _end(self, queue: Queue, end_s: float) -> None:
        wire = queue.items[0].wire
        assert wire is not None
        wire.big, wire.big_until_s, queue.end_s = None, end_s, None
        self._arrive(queue, queue.items[0].event.start_s, end_s)

    def _arrive(self, queue: Queue, start_s: float, end_s: float) -> None:
        """A copy's bytes are there."""
        work = queue.items[0].work
        try:
            if work is not None:
                work()
        except Exception as error:
            self._fail(queue, as_engine_error(error, queue.name))
            return
        self._settle(queue, start_s, end_s)

    def _settle(self, queue: Queue, start_s: float, end_s: float) -> None:
        item = queue.items.popleft()
        queue.free_s = end_s
        if item.on_end is not None:
            item.on_end(start_s, end_s)
        item.event.settle(start_s, end_s)
