"""One layer of a sweep, in the orders that MoE-Lightning and Klotski compare.

They are those of `engine.planner.simulator.batch_schedules`, on a device.  Each is given all micro-batches' hidden
states in front of a layer and leaves those behind it; the next layer's weights are on their way by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from engine.runtime.batch.pipeline.host_attention import AttendedAhead
from engine.runtime.batch.pipeline.layer_run import LayerRun

_AHEAD = 2
"""Micro-batches whose attention is begun before the first one's experts are computed (Algorithm 1, line 3)."""


class Schedule(StrEnum):
    """Orders of a layer's work.

    `TODAY`: micro-batch after micro-batch, experts met one step at a time by the cache (`HybridExperts`).
    """

    CGOPIPE = "cgopipe"
    S3 = "s3"
    TODAY = "today"


class LayerWork(Protocol):
    """One layer of a sweep, of which a schedule decides the order."""

    count: int

    def begin(self, number: int) -> LayerRun:
        """The layer of a micro-batch, up to its first call: pre-attention."""

    def attend_on_cpu(self, number: int, run: LayerRun, *, behind_weights: bool = False) -> AttendedAhead:
        """Begins the attention that `run` wants.

        Args:
            behind_weights: whether what was attended comes back behind the weights that are on their way.
        """

    def finish(self, number: int, run: LayerRun) -> None:
        """The rest of the layer, computed as it comes: experts once this layer's weights are all there."""

    def bring_page(self, page: int, pages: int) -> None:
        """Begins to bring one of so many pages of the next layer's weights."""


def cgopipe(work: LayerWork) -> None:
    """MoE-Lightning's Algorithm 1: CPU attention two micro-batches ahead, weights in pages between hidden states."""
    count = work.count
    runs: dict[int, LayerRun] = {}
    attended: dict[int, AttendedAhead] = {}
    brought = 0

    def ahead(number: int) -> None:
        nonlocal brought
        if number >= count:
            return
        run = runs[number] = work.begin(number)
        if run.call is not None:
            attended[number] = work.attend_on_cpu(number, run)
        work.bring_page(brought, count)
        brought += 1

    try:
        for number in range(_AHEAD):
            ahead(number)
        for number in range(count):
            run = runs[number]
            if number in attended:
                run.answer(attended.pop(number).take())
            work.finish(number, run)
            ahead(number + _AHEAD)
    finally:
        _abandon(list(runs.values()))


def s3(work: LayerWork) -> None:
    """FlexGen with attention on the CPU: the next layer's weights in one piece, hidden states behind them, one
    micro-batch after the other."""
    work.bring_page(0, 1)
    for number in range(work.count):
        run = work.begin(number)
        try:
            if run.call is not None:
                run.answer(work.attend_on_cpu(number, run, behind_weights=True).take())
            work.finish(number, run)
        finally:
            run.abandon()


def _abandon(runs: Sequence[LayerRun]) -> None:
    for run in runs:
        run.abandon()


ORDERS: dict[Schedule, Callable[[LayerWork], None]] = {Schedule.CGOPIPE: cgopipe, Schedule.S3: s3}
"""What each schedule does with a layer."""
