"""The layers of a sweep, in the orders that MoE-Lightning and Klotski compare.

They are those of `engine.planner.simulator.batch_schedules`, on a device.  Each is given all micro-batches' hidden
states in front of the first layer, and stops behind every layer: the next layer's weights are on their way by then, and
where attention runs ahead its first micro-batches have begun.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
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
        """Begins to bring the experts of this layer, or of the next, that are predicted to have the most tokens."""

    def bring_wanted(self, runs: Sequence[LayerRun]) -> None:
        """Begins to bring what these runs, which all wait for their experts, lack: most tokens first."""

    def compute_together(self, runs: Sequence[LayerRun]) -> None:
        """Answers these runs, expert by expert for all of them, in the order in which the experts arrive."""


Layers = Sequence[LayerWork]
"""All layers of a sweep, of as many micro-batches each."""


def cgopipe(layers: Layers) -> Generator[None, None, None]:
    """MoE-Lightning's Algorithm 1: CPU attention two micro-batches ahead, weights in pages between hidden states.

    Both go on across the borders of layers: while a layer's last micro-batches compute, the next layer's first ones
    attend, and its successor's first pages follow as soon as their buffer is free.
    """
    return _ahead(layers, layers[0].count)


def multi_batch(layers: Layers) -> Generator[None, None, None]:
    """Klotski's first step: the next layer's weights in one piece, for all micro-batches; attention ahead."""
    return _ahead(layers, 1)


def _ahead(layers: Layers, pages: int) -> Generator[None, None, None]:
    count = layers[0].count
    lead = min(_AHEAD, count)  # a micro-batch's next layer begins when it has left the one before
    attended: dict[int, AttendedAhead] = {}
    runs: dict[int, LayerRun] = {}

    def begin(place: int) -> None:
        if place < len(layers) * count:
            _begin(layers[place // count], place % count, runs, attended, place)

    try:
        _bring_first(layers[0], pages)
        for place in range(lead):
            begin(place)
        for place in range(len(layers) * count):
            index, number = divmod(place, count)
            run = runs[place]
            if place in attended:
                run.answer(attended.pop(place).take())
            layers[index].finish(number, run)
            del runs[place]
            is_last = number == count - 1
            if is_last and index + 1 < len(layers):
                _bring_first(layers[index + 1], pages)
            elif number + _AHEAD < pages:
                layers[index].bring_page(number + _AHEAD, pages)
            begin(place + lead)
            if is_last:
                yield
    finally:
        _abandon(runs)


def _bring_first(layer: LayerWork, pages: int) -> None:
    """The first pages of a layer's successor: the link always has one to go on with."""
    for page in range(min(_AHEAD, pages)):
        layer.bring_page(page, pages)


def _layer_by_layer(order: Callable[[LayerWork], None]) -> Callable[[Layers], Generator[None, None, None]]:
    """A schedule that begins a layer when all of the one before is done."""

    def run(layers: Layers) -> Generator[None, None, None]:
        for layer in layers:
            order(layer)
            yield

    return run


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


def _begin(
    work: LayerWork,
    number: int,
    runs: dict[int, LayerRun],
    attended: dict[int, AttendedAhead],
    place: int | None = None,
) -> None:
    """Begins a micro-batch's layer, under its number or another `place`."""
    place = number if place is None else place
    run = runs[place] = work.begin(number)
    if isinstance(run.call, AttentionCall):
        attended[place] = work.attend_on_cpu(number, run)


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


ORDERS: dict[Schedule, Callable[[Layers], Generator[None, None, None]]] = {
    Schedule.CGOPIPE: cgopipe,
    Schedule.S3: _layer_by_layer(s3),
    Schedule.S4: _layer_by_layer(s4),
    Schedule.MULTI_BATCH: multi_batch,
    Schedule.HOT_ONLY: _layer_by_layer(hot_only),
    Schedule.KLOTSKI: _layer_by_layer(klotski),
}
"""What each schedule does with a sweep: it stops behind every layer."""
