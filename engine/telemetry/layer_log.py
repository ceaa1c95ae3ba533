"""A log of layers during decode, which take tens of microseconds each: native code stamps them, numpy converts them.

On a machine with two cores, recording on any thread takes time from decoding. So a layer costs no Python at all;
request and step are stored once per step; numpy does the rest, many steps at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.telemetry.lanes import CPU_EXPERTS, EXPERTS
from engine.telemetry.records import SPAN, Records

STAMP = np.dtype([("which", "<u8"), ("begun_ns", "<i8"), ("ended_ns", "<i8"), ("count", "<i8")])
"""When one step of a layer ran, and how many experts it chose; `which` is the address of what describes it."""

Ids = NDArray[np.int64]
Stamped = NDArray[np.void]
"""Of `STAMP`."""


@dataclass(frozen=True, slots=True)
class LoggedLayers:
    """Collected layers: `spans`; and per layer with experts its step, number and experts, concatenated.

    Attributes:
        counts: number of experts per layer.
    """

    spans: Records
    steps: Ids
    layers: Ids
    experts: Ids
    counts: Ids


class _Named(NamedTuple):
    """What addresses in order stand for: the number of a layer, and what its spans are called."""

    addresses: NDArray[np.uint64]
    layers: Ids
    names: Ids

    @classmethod
    def of(cls, layers: dict[int, tuple[int, int]]) -> _Named:
        rows = sorted((which, layer, name) for which, (layer, name) in layers.items())
        rows.append((2**64 - 1, -1, -1))  # so that there is a place after the last one
        addresses, numbers, names = zip(*rows, strict=True)
        return cls(np.array(addresses, np.uint64), np.array(numbers, np.int64), np.array(names, np.int64))

    def of_stamps(self, which: NDArray[np.uint64]) -> tuple[Ids, Ids]:
        """(layer, name), each [n], -1 where it is not known."""
        place = np.searchsorted(self.addresses, which)
        known = (self.addresses[place] == which) & (self.layers[place] >= 0)
        return np.where(known, self.layers[place], -1), np.where(known, self.names[place], -1)


class LayerLog:
    """Whose the stamps of a source are: one thread runs the steps, one collects."""

    def __init__(self) -> None:
        self._source: Any = None
        """`engine.kernels.native.library.NativeStamps`; its counts are for the thread that runs the steps."""
        self._layers: dict[int, tuple[int, int]] = {}
        self._named: _Named | None = None
        self._ends: deque[tuple[int, int, int, int]] = deque()  # no more than there are stamps
        self._marked = self._chosen = self._dropped = 0
        self._on = False
        self._taking = threading.Lock()

    def follow(self, source: Any) -> None:
        with self._taking:
            self._source = source
            source.switch(self._on)
        self.reset()

    def name(self, which: int, layer: int, name: int) -> None:
        """What is stamped with the address `which`: a layer's `EXPERTS`, or another part of it, by its name."""
        with self._taking:
            self._layers[which] = layer, name
            self._named = None

    def switch(self, on: bool) -> None:
        """Lets the source stamp, or not."""
        self._on = on
        if self._source is not None:
            self._source.switch(on)

    @property
    def ended_ns(self) -> int:
        """End of the last stamped step; 0 if there is none."""
        return 0 if self._source is None else self._source.ended_ns

    def end_step(self, request: int, step: int, lane: int | None) -> int:
        """What was stamped since the last call is of this step; how many experts it chose.

        Args:
            lane: attention's, None if its time is unknown.
        """
        source = self._source
        if source is None or (written := source.written) == self._marked:
            return 0
        self._marked, before, self._chosen = written, self._chosen, source.chosen
        self._ends.append((written, request, step, -1 if lane is None else lane))
        return self._chosen - before

    def reset(self) -> None:
        """Forgets what there is, and the count of dropped stamps; steps may run on another thread meanwhile."""
        source = self._source
        if source is None:
            return
        with self._taking:
            self._ends.clear()
            while len(source.take(2**14)[0]):
                pass
            self._marked = source.written
            self._chosen, self._dropped = source.chosen, source.dropped

    @property
    def dropped(self) -> int:
        """Spans dropped because nobody took them in time."""
        return 0 if self._source is None else self._source.dropped - self._dropped

    def take(self) -> LoggedLayers | None:
        with self._taking:
            ends = [self._ends.popleft() for _ in range(len(self._ends))]
            if not ends or self._source is None:
                return None
            until, *of_step = np.array(ends, np.int64).T
            begin = self._source.taken
            stamps, chosen = self._source.take(int(until[-1]) - begin)
            if self._named is None:
                self._named = _Named.of(self._layers)
            named = self._named
        which_step = np.searchsorted(until, np.arange(begin, begin + len(stamps)), side="right")
        request, step, lane = (column[which_step] for column in of_step)
        layer, name = named.of_stamps(stamps["which"])
        is_experts = name == EXPERTS
        spans = np.zeros(len(stamps), SPAN)
        spans["start_ns"], spans["end_ns"] = stamps["begun_ns"], stamps["ended_ns"]
        spans["layer"], spans["request"], spans["step"], spans["expert"] = layer, request, step, -1
        spans["lane"] = np.where(is_experts, CPU_EXPERTS, lane)
        spans["name"] = name
        spans["count"] = np.where(is_experts, stamps["count"], 1)
        counts = stamps["count"]
        uses = chosen[np.repeat(is_experts, counts)].astype(np.int64)
        timed = spans[(layer >= 0) & (spans["lane"] >= 0)]
        return LoggedLayers(timed, step[is_experts], layer[is_experts], uses, counts[is_experts])
