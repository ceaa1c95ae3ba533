"""One layer of a sweep, in the orders that MoE-Lightning and Klotski compare.

They are those of `engine.planner.simulator.batch_schedules`, on a device.  Each is given all micro-batches' hidden
states in front of a layer and leaves those behind it; the next layer's weights are on their way by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from engine.runtime.batch.pipeline.device_attention import CacheAhead
from engine.runtime.batch.pipeline.host_attention import AttendedAhead
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun

_AHEAD = 2
"""Micro-batches whose attention is begun before the first one's experts are computed (Algorithm 1, line 3)."""


class Schedule(StrEnum):
    """Orders of a layer's work.

    `MULTI_BATCH`, `HOT_ONLY` and `KLOTSKI` are the steps of Klotski's ablation (its table 3), attention on the CPU.
    `HYBRID`: micro-batch after micro-batch, experts met one step at a time by the cache (`HybridExperts`).
    """

    CGOPIPE = "cgopipe"
    S3 = "s3"
    S4 = "s4"
    MULTI_BATCH = "multi-batch"
    HOT_ONLY = "hot-only"
    KLOTSKI = "klotski"
    HYBRID = "hybrid"


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

    def fetch_cache(self, number: int) -> CacheAhead:
        """Begins to bring a micro-batch's keys and values."""

    def attend_on_device(self, run: LayerRun, cache: CacheAhead) -> None:
        """Answers the attention that `run` wants, once its keys and values are there."""

    def finish(self, number: int, run: LayerRun) -> None:
        """The rest of the layer, computed as it comes: experts once this layer's weights are all there."""

    def bring_page(self, page: int, pages: int) -> None:
        """Begins to bring one of so many pages of the next layer's weights."""

    def bring_hot(self, *, of_next: bool = False) -> None:
        """Begins to bring the experts of this layer, or of the next, that are foretold to have the most tokens."""

    def bring_wanted(self, runs: Sequence[LayerRun]) -> None:
        """Begins to bring what these runs, which all wait for their experts, lack: most tokens first."""

    def compute_together(self, runs: Sequence[LayerRun]) -> None:
        """Answers these runs, expert by expert for all of them, in the order in which the experts arrive."""


def cgopipe(work: LayerWork) -> None:
    """MoE-Lightning's Algorithm 1: CPU attention two micro-batches ahead, weights in pages between hidden states."""
    _ahead(work, work.count)


def multi_batch(work: LayerWork) -> None:
    """Klotski's first step: the next layer's weights in one piece, for all micro-batches; attention ahead."""
    _ahead(work, 1)


def _ahead(work: LayerWork, pages: int) -> None:
    attended: dict[int, AttendedAhead] = {}
    runs: dict[int, LayerRun] = {}

    def ahead(number: int) -> None:
        if number < work.count:
            _begin(work, number, runs, attended)
        if number < pages:
            work.bring_page(number, pages)

    try:
        for number in range(_AHEAD):
            ahead(number)
        for number in range(work.count):
            run = runs[number]
            if number in attended:
                run.answer(attended.pop(number).take())
            work.finish(number, run)
            ahead(number + _AHEAD)
    finally:
        _abandon(runs)


def hot_only(work: LayerWork) -> None:
    """Klotski's second step: hot experts come during attention, the others once the gates have spoken; micro-batch
    after micro-batch."""
    runs: dict[int, LayerRun] = {}
    try:
        _up_to_gates(work, runs)
        for number, run in runs.items():
            work.finish(number, run)
    finally:
        _abandon(runs)


def klotski(work: LayerWork) -> None:
    """Klotski's Algorithm 1: as `hot_only`, but expert after expert for all micro-batches, in order of arrival."""
    runs: dict[int, LayerRun] = {}
    try:
        _up_to_gates(work, runs)
        work.compute_together([run for run in runs.values() if isinstance(run.call, ExpertsCall)])
        for number, run in runs.items():
            work.finish(number, run)
    finally:
        _abandon(runs)


def _up_to_gates(work: LayerWork, runs: dict[int, LayerRun]) -> None:
    """All micro-batches up to where they want their experts, which are on their way then."""
    attended: dict[int, AttendedAhead] = {}
    work.bring_hot()
    for number in range(min(_AHEAD, work.count)):
        _begin(work, number, runs, attended)
    for number in range(work.count):
        if number in attended:
            runs[number].answer(attended.pop(number).take())
        if number + _AHEAD < work.count:
            _begin(work, number + _AHEAD, runs, attended)
    work.bring_wanted([run for run in runs.values() if isinstance(run.call, ExpertsCall)])
    work.bring_hot(of_next=True)


def _begin(work: LayerWork, number: int, runs: dict[int, LayerRun], attended: dict[int, AttendedAhead]) -> None:
    run = runs[number] = work.begin(number)
    if isinstance(run.call, AttentionCall):
        attended[number] = work.attend_on_cpu(number, run)


def s3(work: LayerWork) -> None:
    """FlexGen with attention on the CPU: the next layer's weights in one piece, hidden states behind them, one
    micro-batch after the other."""
    work.bring_page(0, 1)
    for number in range(work.count):
        run = work.begin(number)
        try:
            if isinstance(run.call, AttentionCall):
                run.answer(work.attend_on_cpu(number, run, behind_weights=True).take())
            work.finish(number, run)
        finally:
            run.abandon()


def s4(work: LayerWork) -> None:
    """FlexGen with attention on the device: the next layer's weights in one piece, keys and values behind them, one
    micro-batch ahead."""
    work.bring_page(0, 1)
    coming = work.fetch_cache(0)
    for number in range(work.count):
        cache = coming
        if number + 1 < work.count:
            coming = work.fetch_cache(number + 1)
        run = work.begin(number)
        try:
            if isinstance(run.call, AttentionCall):
                work.attend_on_device(run, cache)
            work.finish(number, run)
        finally:
            run.abandon()


def _abandon(runs: Mapping[int, LayerRun]) -> None:
    for run in runs.values():
        run.abandon()


ORDERS: dict[Schedule, Callable[[LayerWork], None]] = {
    Schedule.CGOPIPE: cgopipe,
    Schedule.S3: s3,
    Schedule.S4: s4,
    Schedule.MULTI_BATCH: multi_batch,
    Schedule.HOT_ONLY: hot_only,
    Schedule.KLOTSKI: klotski,
}
"""What each schedule does with a layer."""
