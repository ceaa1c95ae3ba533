"""Batch schedules: the order in which the work of a sweep is issued.  Each is written once and used twice.

The batch executor (`engine.runtime.batch.pipeline`) issues real work to a device's streams; the simulator
(`engine.planner.simulator.sweeps`) issues seconds to a timeline.  So the executor runs exactly what was predicted.  A
schedule only defines the order.  It gets all layers of a sweep and yields after every layer; by then the next layer's
weights are in transfer and, where attention runs ahead, its first micro-batches have started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

_AHEAD = 2
"""Micro-batches whose attention starts before the first one's experts are computed (MoE-Lightning, Algorithm 1)."""


class LayerWork(Protocol):
    """One layer of a sweep.  Its `count` micro-batches are identified by number."""

    @property
    def count(self) -> int: ...

    def begin(self, number: int) -> None:
        """Computes a micro-batch's layer up to attention: pre-attention."""

    def attend_in_ram(self, number: int, *, behind_weights: bool = False) -> None:
        """Starts attention on the CPU, over keys and values in RAM.

        Args:
            behind_weights: the attention output is copied back after the weight transfers already queued.
        """

    def take_attended(self, number: int) -> None:
        """Continues with the output of `attend_in_ram` once it is on the device, up to the gates."""

    def fetch_cache(self, number: int) -> None:
        """Starts copying a micro-batch's keys and values to the device, which has room for two micro-batches."""

    def attend_on_device(self, number: int) -> None:
        """Computes attention once its keys and values have arrived, and continues up to the gates."""

    def bring_page(self, page: int, pages: int) -> None:
        """Starts the transfer of one of `pages` pages of the next layer's weights."""

    def bring_layer(self) -> None:
        """Starts the transfer of all experts of this layer that are neither there nor in transfer."""

    def bring_hot(self, *, of_next: bool = False) -> None:
        """Starts the transfer of the experts of this or the next layer that are predicted to get the most tokens."""

    def bring_wanted(self) -> None:
        """Starts the transfer of the missing experts, most tokens first; all micro-batches have reached their gates."""

    def compute_together(self, numbers: Sequence[int]) -> None:
        """Computes expert by expert for all these micro-batches, in the order in which the experts arrive."""

    def compute_in_ram(self, number: int) -> None:
        """Computes a micro-batch's experts on the CPU, except those that stay on the device."""

    def finish(self, number: int) -> None:
        """Completes a micro-batch's layer, including experts not yet computed, once all their weights are there."""


Layers = Sequence[LayerWork]
"""All layers of a sweep, with equal numbers of micro-batches."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of a sweep's work.

    Attributes:
        name: shown to users, and the key in `SCHEDULES`.
        order: issues the work and yields after each layer; None for `HYBRID`.
        whole_layers: experts are computed once their whole layer is there; else once the transferred ones are.
        in_ram: for schedules that copy keys and values to the device: the schedule to use where this is impossible.
    """

    name: str
    order: Callable[[Layers], Iterator[None]] | None
    whole_layers: bool = True
    in_ram: Schedule | None = None
    experts_in_ram: bool = False
    """F_g = 0: experts that do not stay on the card are computed by the CPU."""

    @property
    def attends_on_card(self) -> bool:
        """A_g."""
        return self.in_ram is not None

    def __str__(self) -> str:
        return self.name


# Attention of one layer: yields the numbers of the micro-batches that have reached their gates.

Attention = Callable[[LayerWork], Iterator[int]]


def _in_ram(work: LayerWork) -> Iterator[int]:
    """CPU attention, two micro-batches ahead."""
    for number in range(min(_AHEAD, work.count)):
        _begin_in_ram(work, number)
    for number in range(work.count):
        work.take_attended(number)
        if number + _AHEAD < work.count:
            _begin_in_ram(work, number + _AHEAD)
        yield number


def _on_device(work: LayerWork) -> Iterator[int]:
    """Attention on the device; keys and values are fetched one micro-batch ahead."""
    work.fetch_cache(0)
    for number in range(work.count):
        if number + 1 < work.count:
            work.fetch_cache(number + 1)
        work.begin(number)
        work.attend_on_device(number)
        yield number


def _in_ram_in_turn(work: LayerWork) -> Iterator[int]:
    """CPU attention, one micro-batch at a time; its output is copied behind the weights."""
    for number in range(work.count):
        work.begin(number)
        work.attend_in_ram(number, behind_weights=True)
        work.take_attended(number)
        yield number


def _begin_in_ram(work: LayerWork, number: int) -> None:
    work.begin(number)
    work.attend_in_ram(number)


# Orders of one layer


def _flexgen(attention: Attention, work: LayerWork) -> None:
    """The next layer's weights in one piece, then micro-batch by micro-batch (FlexGen, MoE-Lightning's figure 6)."""
    work.bring_page(0, 1)
    for number in attention(work):
        work.finish(number)


def _layer_first(attention: Attention, work: LayerWork) -> None:
    """Klotski's baseline: a layer's experts in one piece, while all micro-batches compute attention."""
    work.bring_layer()
    for _ in attention(work):
        pass
    _finish(work)


def _hot_only(attention: Attention, work: LayerWork) -> None:
    """Klotski's second step: hot experts are fetched during attention, the others once the gates have run; then
    micro-batch by micro-batch, the first of which uses experts as they arrive."""
    _bring_after_gates(attention, work)
    work.compute_together(range(1))
    _finish(work)


def _klotski(attention: Attention, work: LayerWork) -> None:
    """Klotski's Algorithm 1: as `_hot_only`, but expert by expert for all micro-batches, in order of arrival."""
    _bring_after_gates(attention, work)
    work.compute_together(range(work.count))
    _finish(work)


def _experts_in_ram(attention: Attention, work: LayerWork) -> None:
    """F_g = 0: no expert moves; while the CPU computes one micro-batch's experts, the device runs the next one."""
    for number in attention(work):
        work.compute_in_ram(number)
        work.finish(number)


def _bring_after_gates(attention: Attention, work: LayerWork) -> None:
    work.bring_hot()
    for _ in attention(work):
        pass
    work.bring_wanted()
    work.bring_hot(of_next=True)


def _finish(work: LayerWork) -> None:
    for number in range(work.count):
        work.finish(number)


def layer_by_layer(order: Callable[[LayerWork], None]) -> Callable[[Layers], Iterator[None]]:
    """A schedule that starts a layer only after the previous one has finished."""

    def run(layers: Layers) -> Iterator[None]:
        for layer in layers:
            order(layer)
            yield

    return run


# Orders across layer boundaries


def _cgopipe(layers: Layers) -> Iterator[None]:
    """MoE-Lightning's Algorithm 1: CPU attention two micro-batches ahead, weights in as many pages as micro-batches.

    Both continue across layer boundaries: while a layer's last micro-batches compute, the next layer's first ones run
    attention, and the first pages of the layer after it follow as soon as their buffer is free.
    """
    return _ahead(layers, layers[0].count)


def _multi_batch(layers: Layers) -> Iterator[None]:
    """Klotski's first step: the next layer's weights in one piece, for all micro-batches; attention ahead."""
    return _ahead(layers, 1)


def _ahead(layers: Layers, pages: int) -> Iterator[None]:
    count = layers[0].count
    places = len(layers) * count  # of all micro-batches in all layers, in their order

    def begin(place: int) -> None:
        if place < places:
            _begin_in_ram(layers[place // count], place % count)

    lead = min(_AHEAD, count)  # a micro-batch enters its next layer after leaving the previous one
    _bring_first(layers[0], pages)
    for place in range(lead):
        begin(place)
    for place in range(places):
        index, number = divmod(place, count)
        layers[index].take_attended(number)
        layers[index].finish(number)
        is_last = number == count - 1
        if is_last and index + 1 < len(layers):
            _bring_first(layers[index + 1], pages)
        elif number + _AHEAD < pages:
            layers[index].bring_page(number + _AHEAD, pages)
        begin(place + lead)
        if is_last:
            yield


def _bring_first(layer: LayerWork, pages: int) -> None:
    """The first pages of the next layer's weights, so that the link always has a transfer queued."""
    for page in range(min(_AHEAD, pages)):
        layer.bring_page(page, pages)


CGOPIPE = Schedule("cgopipe", _cgopipe)
S3 = Schedule("s3", layer_by_layer(partial(_flexgen, _in_ram_in_turn)))
S4 = Schedule("s4", layer_by_layer(partial(_flexgen, _on_device)), in_ram=CGOPIPE)
MULTI_BATCH = Schedule("multi-batch", _multi_batch)
HOT_ONLY = Schedule("hot-only", layer_by_layer(partial(_hot_only, _in_ram)), whole_layers=False)
KLOTSKI = Schedule("klotski", layer_by_layer(partial(_klotski, _in_ram)), whole_layers=False)
# As in Klotski's paper: attention on the card, keys and values copied there.
MULTI_BATCH_ON_CARD = Schedule(
    "multi-batch-on-card", layer_by_layer(partial(_layer_first, _on_device)), in_ram=MULTI_BATCH
)
HOT_ONLY_ON_CARD = Schedule("hot-only-on-card", layer_by_layer(partial(_hot_only, _on_device)), False, HOT_ONLY)
KLOTSKI_ON_CARD = Schedule("klotski-on-card", layer_by_layer(partial(_klotski, _on_device)), False, KLOTSKI)
CPU_EXPERTS = Schedule("cpu-experts", layer_by_layer(partial(_experts_in_ram, _in_ram)), False, experts_in_ram=True)
CPU_EXPERTS_ON_CARD = Schedule(
    "cpu-experts-on-card", layer_by_layer(partial(_experts_in_ram, _on_device)), False, CPU_EXPERTS, True
)
HYBRID = Schedule("hybrid", None)
"""Micro-batch by micro-batch through a layer, as in a chat: the expert cache handles one step at a time.  The order is
the cache's own, which the strategies of single requests simulate."""

SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        CGOPIPE,
        S3,
        S4,
        MULTI_BATCH,
        HOT_ONLY,
        KLOTSKI,
        MULTI_BATCH_ON_CARD,
        HOT_ONLY_ON_CARD,
        KLOTSKI_ON_CARD,
        CPU_EXPERTS,
        CPU_EXPERTS_ON_CARD,
        HYBRID,
    )
}
"""All schedules, by name."""
