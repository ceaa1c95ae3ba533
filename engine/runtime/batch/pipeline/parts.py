"""A sweep with nothing at the same time, each of its parts timed: what schedules are predicted from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol, TypeVar

import torch

from engine.planner.simulator.sweeps import SweepParts
from engine.runtime.batch.pipeline.device_attention import CacheAhead
from engine.runtime.batch.pipeline.host_attention import AttendedAhead
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun

T = TypeVar("T")


class TimedLayer(Protocol):
    """One layer of a sweep, part by part."""

    count: int

    def load(self) -> bool:
        """Brings all its weights and waits for them; whether they were not there."""

    def begin(self, number: int) -> LayerRun:
        """See `LayerWork`."""

    def attend_on_cpu(self, number: int, run: LayerRun) -> AttendedAhead:
        """See `LayerWork`."""

    def fetch_cache(self, number: int) -> CacheAhead:
        """See `LayerWork`."""

    def attended_there(self, call: AttentionCall, cache: CacheAhead) -> torch.Tensor:
        """What the device makes of attention."""

    def computed(self, call: ExpertsCall) -> torch.Tensor:
        """What the experts make of one micro-batch, all weights there."""

    def computed_together(self, calls: Sequence[ExpertsCall]) -> int:
        """Computes all micro-batches expert by expert, for the time that it takes: how many experts they want."""

    def end(self, number: int, run: LayerRun) -> None:
        """Keeps what a run that has ended has made."""


@dataclass
class _Times:
    """Seconds by part, one entry for each time that it was seen."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], T]) -> T:
        begun_s = perf_counter()
        found = work()
        self.seconds.setdefault(name, []).append(perf_counter() - begun_s)
        return found

    def mean(self, name: str) -> float:
        return statistics.fmean(self.seconds.get(name, [0.0]))


class PartsTimer:
    """Takes sweeps through a model's layers in place of a schedule; answers are the same.

    Args:
        experts, hot: of a layer, and how many of them a schedule brings before it is known which are wanted.
        card_attention: whether attention on the device is timed as well.

    Attributes:
        sweeps: what the parts of each took, but for what lies outside the layers.
        inside_s: that all of them took, what was done twice included.
    """

    def __init__(self, experts: int, hot: int, *, card_attention: bool) -> None:
        self._experts, self._hot, self._card_attention = experts, hot, card_attention
        self.sweeps: list[SweepParts] = []
        self.inside_s = 0.0

    def order(self, layers: Sequence[TimedLayer]) -> Generator[None, None, None]:
        """See `engine.runtime.batch.pipeline.schedules`."""
        times, wanted = _Times(), list[float]()
        for layer in layers:
            begun_s = perf_counter()
            self._layer(layer, times, wanted)
            self.inside_s += perf_counter() - begun_s
            if layer is layers[-1]:
                self._end(layers, times, wanted)
            yield

    def _end(self, layers: Sequence[TimedLayer], times: _Times, wanted: list[float]) -> None:
        self.sweeps.append(
            SweepParts(
                layers=len(layers),
                count=layers[0].count,
                before_s=times.mean("before"),
                between_s=times.mean("between"),
                after_s=times.mean("after"),
                attention_s=times.mean("attention"),
                card_attention_s=times.mean("card attention"),
                cache_s=times.mean("cache"),
                experts_s=times.mean("experts"),
                together_s=times.mean("together"),
                weights_s=times.mean("weights"),
                wanted=statistics.fmean(wanted) if wanted else 0.0,
                hot=self._hot / self._experts,
                outside_s=0.0,
            )
        )

    def _layer(self, layer: TimedLayer, times: _Times, wanted: list[float]) -> None:
        begun_s = perf_counter()
        if layer.load():
            times.seconds.setdefault("weights", []).append(perf_counter() - begun_s)
        runs = [times.time("before", lambda number=number: layer.begin(number)) for number in range(layer.count)]  # type: ignore[misc]
        for number, run in enumerate(runs):
            call = run.call
            if isinstance(call, AttentionCall):
                self._attend(layer, number, run, call, times)
        calls = [run.call for run in runs if isinstance(run.call, ExpertsCall)]
        if calls:
            wanted.append(times.time("together", lambda: layer.computed_together(calls)) / self._experts)
        for number, run in enumerate(runs):
            while isinstance(run.call, ExpertsCall):
                call = run.call
                result = times.time("experts", lambda call=call: layer.computed(call))  # type: ignore[misc]
                times.time("after", lambda run=run, result=result: run.answer(result))  # type: ignore[misc]
            layer.end(number, run)

    def _attend(self, layer: TimedLayer, number: int, run: LayerRun, call: AttentionCall, times: _Times) -> None:
        attended = times.time("attention", lambda: layer.attend_on_cpu(number, run).take())
        if self._card_attention:
            cache = times.time("cache", lambda: _arrived(layer.fetch_cache(number)))
            times.time("card attention", lambda: layer.attended_there(call, cache))
        times.time("between", lambda: run.answer(attended))


def _arrived(cache: CacheAhead) -> CacheAhead:
    cache.arrived.result().wait()
    return cache
