"""A sweep without overlap, each of its parts timed: schedules are predicted from these times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from engine.common import clock
from engine.planner.simulator.sweeps import CopyCost, LayerTimes, SweepParts
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun
from engine.runtime.batch.pipeline.shared_attention import Cache

T = TypeVar("T")


class TimedLayer(Protocol):
    """One layer of a sweep, part by part.

    Attributes:
        runs: the micro-batches that are inside the layer.
    """

    runs: dict[int, LayerRun]

    @property
    def count(self) -> int: ...

    def load(self) -> bool:
        """Transfers all its weights and waits for them; returns whether any were missing."""

    def begin(self, number: int) -> None:
        """See `LayerWork`; so are `attend_in_ram` and `finish`."""

    def attend_in_ram(self, number: int) -> None: ...

    def finish(self, number: int) -> None: ...

    def attended(self, number: int) -> torch.Tensor:
        """The output of attention in RAM, once it is on the device."""

    def cache_there(self, number: int) -> Cache:
        """Transfers a micro-batch's keys and values and waits for them."""

    def attended_there(self, call: AttentionCall, cache: Cache) -> torch.Tensor:
        """The output of attention on the device."""

    def computed(self, call: ExpertsCall) -> torch.Tensor:
        """The experts' output for one micro-batch, with all weights there."""

    def computed_in_ram(self, call: ExpertsCall) -> torch.Tensor:
        """The same, computed by the CPU."""

    def computed_together(self) -> int:
        """Computes all micro-batches expert by expert, to be timed; returns the number of experts used."""


@dataclass
class _Times:
    """Seconds by part, one entry per run."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], T]) -> T:
        begun_s = clock.now()
        found = work()
        self.seconds.setdefault(name, []).append(clock.now() - begun_s)
        return found

    def mean(self, name: str) -> float:
        return statistics.fmean(self.seconds.get(name, [0.0]))


class PartsTimer:
    """Runs sweeps through a model's layers in place of a schedule; answers are the same.

    Args:
        experts, hot: experts of a layer, and how many a schedule transfers before it is known which are used.

    Attributes:
        sweeps: times of the parts of each sweep, without what is outside the layers.
        inside_s: time inside the layers over all sweeps, including work that was repeated.
    """

    def __init__(self, experts: int, hot: int) -> None:
        self._experts, self._hot = experts, hot
        self.sweeps: list[SweepParts] = []
        self.inside_s = 0.0

    def order(self, layers: Sequence[TimedLayer]) -> Generator[None, None, None]:
        times, wanted = _Times(), list[float]()
        for layer in layers:
            begun_s = clock.now()
            self._layer(layer, times, wanted)
            self.inside_s += clock.now() - begun_s
            if layer is layers[-1]:
                self._end(layers, times, wanted)
            yield

    def _end(self, layers: Sequence[TimedLayer], times: _Times, wanted: list[float]) -> None:
        used = max(1, round(statistics.fmean(wanted))) if wanted else 1
        layer = LayerTimes(
            count=layers[0].count,
            before_s=times.mean("before"),
            between_s=times.mean("between"),
            after_s=times.mean("after"),
            attention_s=times.mean("attention"),
            card_attention_s=times.mean("card attention"),
            cache=CopyCost(times.mean("cache")),
            experts_s=times.mean("experts"),
            expert_s=times.mean("together") / used,
            host_experts_s=times.mean("host experts"),
            expert=CopyCost(times.mean("weights") / self._experts),
            experts=self._experts,
            wanted=used,
            hot=min(self._hot, used),
        )
        self.sweeps.append(SweepParts(len(layers), layer))

    def _layer(self, layer: TimedLayer, times: _Times, wanted: list[float]) -> None:
        begun_s = clock.now()
        if layer.load():
            times.seconds.setdefault("weights", []).append(clock.now() - begun_s)
        for number in range(layer.count):
            times.time("before", lambda number=number: layer.begin(number))  # type: ignore[misc]
        for number, run in layer.runs.items():
            call = run.call
            if isinstance(call, AttentionCall):
                self._attend(layer, number, run, call, times)
        if any(isinstance(run.call, ExpertsCall) for run in layer.runs.values()):
            wanted.append(times.time("together", layer.computed_together))
        for number, run in list(layer.runs.items()):
            while isinstance(run.call, ExpertsCall):
                call = run.call
                times.time("host experts", lambda call=call: layer.computed_in_ram(call))  # type: ignore[misc]
                result = times.time("experts", lambda call=call: layer.computed(call))  # type: ignore[misc]
                times.time("after", lambda run=run, result=result: run.answer(result))  # type: ignore[misc]
            layer.finish(number)

    def _attend(self, layer: TimedLayer, number: int, run: LayerRun, call: AttentionCall, times: _Times) -> None:
        def in_ram() -> torch.Tensor:
            layer.attend_in_ram(number)
            return layer.attended(number)

        attended = times.time("attention", in_ram)
        cache = times.time("cache", lambda: layer.cache_there(number))
        times.time("card attention", lambda: layer.attended_there(call, cache))
        times.time("between", lambda: run.answer(attended))
