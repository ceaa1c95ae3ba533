"""The order in which schedules hand out a sweep's work, without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.batch.pipeline.layer_run import AttentionCall
from engine.runtime.batch.pipeline.schedules import ORDERS, Schedule

Event = tuple[str, int, int]
"""What, of which layer, of which micro-batch or page."""


class _Run:
    """A layer of a micro-batch that wants to attend."""

    def __init__(self) -> None:
        nothing = torch.empty(0)
        self.call: Any = AttentionCall(None, nothing, nothing, nothing)
        self.abandoned = False

    def answer(self, _given: Any) -> None:
        self.call = None

    def abandon(self) -> None:
        self.abandoned = True


@dataclass
class _Layer:
    """Notes what it is asked."""

    index: int
    count: int
    events: list[Event] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)

    def begin(self, number: int) -> Any:
        self.events.append(("begin", self.index, number))
        self.runs.append(_Run())
        return self.runs[-1]

    def attend_on_cpu(self, number: int, _run: Any, *, behind_weights: bool = False) -> Any:
        self.events.append(("attend", self.index, number))

        class Attended:
            def take(self) -> Any:
                return None

        return Attended()

    def finish(self, number: int, _run: Any) -> None:
        self.events.append(("finish", self.index, number))

    def bring_page(self, page: int, _pages: int) -> None:
        self.events.append(("page", self.index, page))


def _events(schedule: Schedule, layers: int, count: int, stop: int | None = None) -> list[_Layer]:
    events: list[Event] = []
    works = [_Layer(index, count, events) for index in range(layers)]
    order = ORDERS[schedule](works)  # type: ignore[arg-type]
    for index, _ in enumerate(order):
        assert events.index(("finish", index, count - 1)) >= 0  # it stops behind each layer
        if index == stop:
            order.close()
            break
    return works


@given(st.integers(1, 5), st.integers(1, 7))
def test_cgopipe_goes_on_across_the_borders_of_layers(layers: int, count: int) -> None:
    events = _events(Schedule.CGOPIPE, layers, count)[0].events
    place = {event: position for position, event in enumerate(events)}
    assert len(place) == len(events)  # nothing twice
    for index in range(layers):
        assert [e for e in events if e[:2] == ("page", index)] == [("page", index, page) for page in range(count)]
        finished = [place["finish", index, number] for number in range(count)]
        assert finished == sorted(finished)
        for number in range(count):
            assert place["begin", index, number] < place["attend", index, number] < finished[number]
            if index:
                assert place["begin", index, number] > place["finish", index - 1, number]
        if index + 1 < layers:
            last = place["finish", index, count - 1]
            # A buffer is free only behind the layer that computes from it; then its pages come first.
            assert events[last + 1] == ("page", index + 1, 0)
            assert all(place["page", index + 1, page] > last for page in range(count))
            # The next layer attends while this one's last micro-batches compute.
            ahead = min(2, count) - 1
            assert all(place["attend", index + 1, number] < last for number in range(ahead))


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_layers_that_were_begun_ahead_are_let_go_of(stop: int) -> None:
    works = _events(Schedule.CGOPIPE, 4, 3, stop)
    begun = {(index, number) for kind, index, number in works[0].events if kind == "begin"}
    finished = {(index, number) for kind, index, number in works[0].events if kind == "finish"}
    assert begun > finished
    for index, number in begun - finished:
        assert works[index].runs[number].abandoned


def test_other_schedules_finish_a_layer_before_the_next_begins() -> None:
    events = _events(Schedule.S3, 3, 2)[0].events
    assert [index for _, index, _ in events] == sorted(index for _, index, _ in events)
