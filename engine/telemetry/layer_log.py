"""A log of layers during decode, which take tens of microseconds each: converted to spans when collected.

On a machine with two cores, recording on any thread takes time from decoding. So a layer adds one tuple; request and
step are stored once per step; numpy does the rest, many steps at a time.
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
"""Capacity: some seconds of the fastest decode."""

Layer = tuple[int, int, int, int, bytes]
"""(layer, start, end of attention, end of experts, chosen experts: int64 [k])."""
_Step = tuple[list[Layer], int, int, int | None]

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LoggedLayers:
    """Collected layers: `spans`, two per layer; and per layer its step, number and experts, concatenated.

    Attributes:
        counts: number of experts per layer.
    """

    spans: Records
    steps: Ids
    layers: Ids
    experts: Ids
    counts: Ids


class LayerLog:
    """A ring of steps with one writer and one reader; when full, the oldest are dropped and counted."""

    def __init__(self, capacity: int = LOG_STEPS) -> None:
        self._steps: deque[_Step] = deque(maxlen=capacity)
        self._added = self._taken = 0

    def add(self, layers: list[Layer], request: int, step: int, lane: int | None) -> None:
        """Adds all layers of one step; `lane` is attention's, None if its time is unknown."""
        self._steps.append((layers, request, step, lane))
        self._added += len(layers)

    def reset(self) -> None:
        """Resets the count of dropped steps; call after `take`."""
        self._added = self._taken = 0

    @property
    def dropped(self) -> int:
        """Spans dropped before they were taken; exact while the writer is idle."""
        waiting = sum(len(layers) for layers, *_ in list(self._steps))
        return 2 * max(0, self._added - self._taken - waiting)

    def take(self) -> LoggedLayers | None:
        """Takes the layers present at the start of the call; None if there were none."""
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
