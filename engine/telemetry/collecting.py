"""Collects everything that is recorded inside a block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.telemetry.recorder import RECORDER, Recorder
from engine.telemetry.records import Records, no_spans, no_steps
from engine.telemetry.trace_export import joined

_TAKE_S = 0.2


@dataclass
class Collection:
    """A collected recording.

    Attributes:
        spans, steps: complete once recording has ended.
        dropped: number of lost spans.
    """

    spans: Records = field(default_factory=no_spans)
    steps: Records = field(default_factory=no_steps)
    dropped: int = 0


@contextmanager
def collected(recorder: Recorder = RECORDER) -> Iterator[Collection]:
    """Records inside the block; unfinished work is left out."""
    result, ending = Collection(), threading.Event()
    spans: list[Records] = []
    steps: list[Records] = []

    def take() -> None:
        spans.append(recorder.take_spans())
        steps.append(recorder.take_steps())

    def serve() -> None:
        while not ending.wait(_TAKE_S):
            take()

    thread = threading.Thread(target=serve, name="telemetry", daemon=True)
    recorder.start()
    thread.start()
    try:
        yield result
    finally:
        recorder.stop()
        ending.set()
        thread.join()
        take()
        result.spans, result.steps = joined(spans, no_spans()), joined(steps, no_steps())
        result.dropped = recorder.dropped_spans
