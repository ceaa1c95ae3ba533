"""Layers that single tokens go through, tens of microseconds each: noted as they pass, made spans of when taken.

On a machine of two cores whatever recording costs is time that decoding has not got, on whichever thread it is done.
So a layer leaves one tuple; whose it was is told once for all layers of a step; and numpy does the rest, many steps at
a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engine.telemetry.lanes import ATTENTION, CPU_EXPERTS, EXPERTS
from engine.telemetry.records import SPAN, Records

LOG_STEPS = 2**11
"""Some seconds of the fastest decode."""

Layer = tuple[int, int, int, int, bytes]
"""(number, when it began, when its attention had been computed, when its experts had, whom it chose: int64 [k])."""
_Step = tuple[list[Layer], int, int, int | None]

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoggedLayers:
    """What was taken: `spans`, two for each layer; and of each layer its step, number and experts one after the other.

    Attributes:
        counts: experts of each layer.
    """

    spans: Records
    steps: Ids
    layers: Ids
    experts: Ids
    counts: Ids


class LayerLog:
    """One thread adds steps, one takes them; the oldest go when it is full, and are counted."""

    def __init__(self, capacity: int = LOG_STEPS) -> None:
        self._steps: deque[_Step] = deque(maxlen=capacity)
        self._added = self._taken = 0

    def add(self, layers: list[Layer], request: int, step: int, lane: int | None) -> None:
        """All layers of one step; `lane` is that of attention, None if it is not known when it was computed."""
        self._steps.append((layers, request, step, lane))
        self._added += len(layers)

    def reset(self) -> None:
        """Forgets what has been dropped so far; after a `take`."""
        self._added = self._taken = 0

    @property
    def dropped(self) -> int:
        """Spans that nobody took in time; exact while the owner rests."""
        waiting = sum(len(layers) for layers, *_ in list(self._steps))
        return 2 * max(0, self._added - self._taken - waiting)

    def take(self) -> LoggedLayers | None:
        """What was there when it began; None if nothing was."""
        steps: list[_Step] = []
        for _ in range(len(self._steps)):
            try:
                steps.append(self._steps.popleft())
            except IndexError:  # recording has started again
                break
        rows = list(chain.from_iterable(layers for layers, *_ in steps))
        self._taken += len(rows)
        if not rows:
            return None
        lengths = [len(layers) for layers, *_ in steps]
        request, step, lane = (
            np.repeat(np.array(whose, np.int64), lengths)
            for whose in zip(*((r, s, -1 if lane is None else lane) for _, r, s, lane in steps), strict=True)
        )
        numbers, begun, attended, ended, chosen = zip(*rows, strict=True)
        number, experts = np.array(numbers, np.int64), np.frombuffer(b"".join(chosen), np.int64)
        counts = np.fromiter(map(len, chosen), np.int64, len(chosen)) // 8
        spans = np.zeros((2, len(rows)), SPAN)
        spans["layer"], spans["request"], spans["step"], spans["expert"] = number, request, step, -1
        attention, computed = spans
        attention["start_ns"], attention["lane"], attention["name"], attention["count"] = begun, lane, ATTENTION, 1
        attention["end_ns"] = computed["start_ns"] = attended
        computed["end_ns"], computed["count"] = ended, counts
        computed["lane"], computed["name"] = CPU_EXPERTS, EXPERTS
        timed = spans.reshape(-1)
        if (lane < 0).any():
            timed = timed[timed["lane"] >= 0]
        return LoggedLayers(timed, step, number, experts, counts)
