"""`switchyard bench batch --schedules`: schedules of a layer's work on a device, on the same rows, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.bench.decode import batch_rate, prompts_of
from engine.bench.opened import opened
from engine.bench.report import Report, in_turn
from engine.common import clock
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CopyRecord, Device, Direction
from engine.planner.schedules import CGOPIPE, MULTI_BATCH, SCHEDULES, Schedule
from engine.planner.simulator.sweeps import CopyCost, LayerTimes, SweepParts, predicted_seconds
from engine.runtime.batch.pipeline.layer_run import AttentionCall, ExpertsCall, LayerRun
from engine.runtime.batch.policy import BatchPolicy, policy_for
from engine.runtime.schedule.executor import BatchExecutor

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

T = TypeVar("T")

_WARM_UP_TOKENS = 2
SIMPLE = "simple pipeline"
"""The baseline of Klotski's table 3: each micro-batch passes the whole model separately."""


@dataclass(frozen=True, slots=True)
class SchedulesPlan:
    """What to run: `rows` prompts of MTBench's lengths, `tokens` generated for each, `micro_batch` rows at once."""

    rows: int
    tokens: int
    repeats: int
    micro_batch: int


def bench_schedules(config: EngineConfig, plan: SchedulesPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: generated tokens per second of each schedule, measured and simulated; CGOPipe against each other one;
    and utilisation of the link.

    The simulation only uses the parts of a sweep, timed separately; it models their overlap. Nothing is cached on the
    device, so that all schedules move the same weights.
    """
    config = replace(config, cache_slots=0)
    if config.threads is None and config.device.startswith("emulated:"):
        config = replace(config, threads=1)  # the emulated card needs the other core
    with opened(config) as loaded:
        device = _device(loaded)
        prompts = prompts_of(loaded, plan.rows)
        predicted = _predicted(loaded, plan, prompts)
        say(", ".join(f"{name} predicted {rate:.1f} tokens/s" for name, rate in predicted.items()))
        found = _timed(loaded, device, plan, prompts, list(_policies(loaded, plan)), report, say)
    rates = {name: [rate for rate, _share in values] for name, values in found.items()}
    title = f"{plan.rows} rows, {plan.tokens} tokens each"
    for name, values in rates.items():
        report.add(f"{title}, {name}", values, "tokens/s", predicted=predicted.get(name))
    ours = rates.pop(CGOPIPE.name)
    report.add_against(f"{title}, CGOPipe", ours, rates)
    for name, pairs in found.items():
        report.add(f"link busy, {name}", [statistics.median(100 * share for _rate, share in pairs)], "%", limit=100.0)


def schedule_rates(
    config: EngineConfig, plan: SchedulesPlan, names: Sequence[str], report: Report, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Generated tokens per second of some schedules, in turn, with nothing cached on the device."""
    with opened(replace(config, cache_slots=0, threads=1)) as loaded:
        found = _timed(loaded, _device(loaded), plan, prompts_of(loaded, plan.rows), names, report, say)
    return {name: [rate for rate, _share in values] for name, values in found.items()}


def _timed(
    loaded: LoadedModel,
    device: Device,
    plan: SchedulesPlan,
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    report: Report,
    say: Callable[[str], None],
) -> dict[str, list[tuple[float, float]]]:
    def run(policy: BatchPolicy, repeat: int) -> tuple[float, float]:
        rate, share = _run(loaded, device, policy, prompts, plan.tokens if repeat else _WARM_UP_TOKENS)
        say(f"  {rate:.1f} tokens/s, link {share:.0%} busy")
        return rate, share

    policies = _policies(loaded, plan)
    return in_turn({name: partial(run, policies[name]) for name in names}, plan.repeats, report, say)


def _predicted(loaded: LoadedModel, plan: SchedulesPlan, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Tokens per second by each schedule that is simulated, from sweeps whose parts are timed separately."""
    timer = PartsTimer()
    executor = BatchExecutor(loaded, replace(_policies(loaded, plan)[CGOPIPE.name], schedule=timer.schedule))
    try:
        batch_rate(executor, prompts, _WARM_UP_TOKENS)
        if not timer.sweeps:  # they follow no schedule
            return {}
        timer.sweeps.clear()
        timer.inside_s = 0.0
        begun_s = clock.now()
        batch_rate(executor, prompts, plan.tokens)
        outside_s = max(0.0, clock.now() - begun_s - timer.inside_s) / len(timer.sweeps)
    finally:
        executor.close()
    sweeps = [replace(parts, outside_s=outside_s) for parts in timer.sweeps]
    found = {name: predicted_seconds(schedule, sweeps) for name, schedule in SCHEDULES.items()}
    rounds = sweeps[0].times.count
    alone = [
        replace(parts, times=replace(parts.times, count=1), outside_s=parts.outside_s / rounds) for parts in sweeps
    ] * rounds
    found[SIMPLE] = predicted_seconds(MULTI_BATCH, alone)
    return {name: plan.rows * plan.tokens / seconds for name, seconds in found.items() if seconds}


class PartsTimer:
    """Sweeps without overlap, each of their parts timed: schedules are predicted from these times.

    Attributes:
        schedule: by which they run; answers are those of any other.
        sweeps: times of the parts of each sweep, without what is outside the layers.
        inside_s: time inside the layers over all sweeps, including work that was repeated.
    """

    def __init__(self) -> None:
        self.schedule = Schedule("timed", self._order)
        self.sweeps: list[SweepParts] = []
        self.inside_s = 0.0

    def _order(self, layers: Sequence[Any]) -> Iterator[None]:
        times, wanted = _Times(), list[float]()
        for index, layer in enumerate(layers):
            begun_s = clock.now()
            self._layer(index, layer, times, wanted)
            self.inside_s += clock.now() - begun_s
            if layer is layers[-1]:
                self._end(layers, times, wanted)
            yield

    def _end(self, layers: Sequence[Any], times: _Times, wanted: list[float]) -> None:
        pipeline, used = layers[0].pipeline, max(1, round(statistics.fmean(wanted))) if wanted else 1
        experts = pipeline.experts.most
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
            expert=CopyCost(times.mean("weights") / experts),
            experts=experts,
            wanted=used,
            hot=min(pipeline.experts_per_token, used),
        )
        self.sweeps.append(SweepParts(len(layers), layer))

    def _layer(self, index: int, layer: Any, times: _Times, wanted: list[float]) -> None:
        experts, begun_s = layer.pipeline.experts, clock.now()
        if _load(experts.cards[0].experts, index):
            times.seconds.setdefault("weights", []).append(clock.now() - begun_s)
        for number in range(layer.count):
            times.time("before", partial(layer.begin, number))
        for number, run in layer.runs.items():
            if isinstance(run.call, AttentionCall):
                self._attend(index, layer, number, run, run.call, times)
        calls = [run.call for run in layer.runs.values() if isinstance(run.call, ExpertsCall)]
        if calls:
            times.time("together", lambda: experts.compute_together(calls))
            wanted.append(len({expert for call in calls for expert in call.index.flatten().tolist()}))
        for number, run in list(layer.runs.items()):
            while isinstance(run.call, ExpertsCall):
                call = run.call
                times.time("host experts", partial(experts.compute_in_ram, call))
                result = times.time("experts", partial(experts.compute, call))
                times.time("after", partial(run.answer, result))
            layer.finish(number)

    @staticmethod
    def _attend(index: int, layer: Any, number: int, run: LayerRun, call: AttentionCall, times: _Times) -> None:
        def in_ram() -> torch.Tensor:
            layer.attend_in_ram(number)
            attended: torch.Tensor = layer.attended.pop(number)()
            return attended

        def cache_there() -> Any:
            layer.fetch_cache(number)
            cache = layer.caches.pop(number)
            for part in cache:
                part.arrived.result().wait()
            return cache

        attended = times.time("attention", in_ram)
        cache = times.time("cache", cache_there)
        times.time("card attention", lambda: layer.pipeline.attend_there(index, call, cache))
        times.time("between", lambda: run.answer(attended))


def _load(experts: Any, index: int) -> bool:
    """Transfers a layer's experts and waits for them; returns whether any was missing."""
    number = experts._first_of[index]
    if number is None:
        return False
    half = experts._buffers.begin(number)
    before = len(half.copied)
    experts.bring_layer(index)
    for arrived in half.copied.values():
        arrived.wait()
    return len(half.copied) > before


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


def busy_share(copies: Sequence[CopyRecord], since_s: float, until_s: float) -> float:
    """The fraction of an interval in which at least one of these copies was running."""
    total, reached = 0.0, since_s
    for copy in sorted(copies, key=lambda copy: copy.started_s):
        begin, end = max(copy.started_s, reached), min(copy.ended_s, until_s)
        if end > begin:
            total += end - begin
            reached = end
    return total / (until_s - since_s)


def _policies(loaded: LoadedModel, plan: SchedulesPlan) -> dict[str, BatchPolicy]:
    base = replace(policy_for(loaded), rows=plan.rows, micro_batch_rows=plan.micro_batch)
    policies = {name: replace(base, schedule=schedule) for name, schedule in SCHEDULES.items()}
    policies[SIMPLE] = replace(base, rows=plan.micro_batch, schedule=MULTI_BATCH)
    return policies


def _run(
    loaded: LoadedModel, device: Device, policy: BatchPolicy, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, float]:
    """(tokens per second, busy fraction of the link from the first copy to the last)."""
    copies: list[CopyRecord] = []
    executor = BatchExecutor(loaded, policy)
    stop = device.copy_log.listen(copies.append)
    try:
        rate = batch_rate(executor, prompts, tokens)
    finally:
        stop()
        executor.close()
    there = [copy for copy in copies if copy.direction == Direction.H2D]
    if not there:
        return rate, 0.0
    return rate, busy_share(there, min(c.started_s for c in there), max(c.ended_s for c in there))


def _device(loaded: LoadedModel) -> Device:
    if loaded.devices is None or len(loaded.devices.devices) != 1 or not loaded.devices.experts.activations:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{loaded.info.name} on {loaded.info.device} brings no experts to a device: choose --device cuda:0 or "
            "emulated:slow-link, and a model with experts.",
        )
    return loaded.devices.devices[0]
