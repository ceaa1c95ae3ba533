"""The worker's two pipes: commands in, events out, and nothing else on either."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.common.channel import MAX_LINE_BYTES, Pipes
from engine.protocol import HEARTBEAT_S, Droppable, Event, Heartbeat, Sample, encode

_BATCH = 256
MOST_OFFERED = 64
"""Most droppable events in the queue: a few seconds of recording, about a megabyte."""


def claim_pipes() -> tuple[int, int]:
    """Private copies of stdin and stdout; the public ones become the null device and stderr.

    A library's `print` then goes to the log instead of the stream, and nothing else can read commands.

    Returns:
        The file descriptors of the commands and of the events, not inherited by child processes.
    """
    commands, events = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # started without stderr
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    os.close(nowhere)
    if sys.platform == "win32":
        import msvcrt

        msvcrt.setmode(commands, os.O_BINARY)
        msvcrt.setmode(events, os.O_BINARY)
    return commands, events


def claimed_pipes(most_bytes: int = MAX_LINE_BYTES) -> Pipes:
    """See `claim_pipes`; longer lines than this are rejected."""
    commands, events = claim_pipes()
    return Pipes(os.fdopen(commands, "rb"), os.fdopen(events, "wb"), most_bytes)


class EventWriter:
    """Writes events on its own thread, so that a window that reads slowly never delays a token.

    Events wait in an unbounded queue and arrive in order, but for those that are `Droppable`. Only the latest sample of
    each kind is kept, and is sent when nothing else waits. A `Heartbeat` goes out every `HEARTBEAT_S`.
    """

    def __init__(self, fd: int, on_broken: Callable[[], None]) -> None:
        """`on_broken` is called, on the writer's thread, when the pipe is broken."""
        self._fd = fd
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._queue: deque[Event] = deque()
        self._offered = 0
        self._samples: dict[type, Sample] = {}
        self._idle = True
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="event-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, event: Event) -> bool:
        """Has it written; false if it is droppable and too many of those are waiting."""
        with self._changed:
            if isinstance(event, Sample):
                self._samples[type(event)] = event
            elif isinstance(event, Droppable) and self._offered >= MOST_OFFERED:
                return False
            else:
                self._offered += isinstance(event, Droppable)
                self._queue.append(event)
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued has been written; false on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle and not self._queue, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        next_beat = time.monotonic() + HEARTBEAT_S
        while True:
            with self._changed:
                self._idle = True
                self._changed.notify_all()
                wait_s = max(0.0, next_beat - time.monotonic())
                self._changed.wait_for(lambda: self._queue or self._samples or self._closed, wait_s)
                if self._closed and not self._queue:
                    return
                batch: list[Event] = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
                self._offered -= sum(isinstance(event, Droppable) for event in batch)
                if not self._queue and self._samples:
                    batch += self._samples.values()
                    self._samples = {}
                self._idle = False
            if time.monotonic() >= next_beat:
                batch.append(Heartbeat(time.monotonic()))
                next_beat = time.monotonic() + HEARTBEAT_S
            try:
                _write_all(self._fd, b"".join(encode(event) for event in batch))
            except OSError:
                self._on_broken()
                return


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
