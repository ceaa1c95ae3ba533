"""`switchyard bench telemetry`: the cost of telemetry: decode with it on and off, in turn.

A shared machine's speed changes by more than telemetry costs, within a second.  So one generation goes on in short
stretches, every second one recorded, in random order, and neighbours are compared.  What is recorded is collected twice
a second, which no short stretch sees: the collector's processor time is measured while a longer run is recorded, and
counted as if no token came meanwhile.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.bench.opened import opened
from engine.bench.report import Report, in_turn
from engine.common.config import EngineConfig, SamplingParams
from engine.process.streams import EventWriter
from engine.process.telemetry import TelemetryService
from engine.protocol import WatchTelemetry
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler
from engine.runtime.telemetry.model_telemetry import ModelTelemetry
from engine.telemetry.recorder import RECORDER

TARGET = 0.99
"""Required fraction of the speed without telemetry."""
_PROMPT = "A railway switchyard sorts freight cars. Explain in plain words how the hump and the switches work."
_PATIENCE_S = 10.0
_SETTLES_S = 0.01
"""For so long the collecting thread must have slept: it has more to do when it is switched on or off."""
_WARM_UP = 4
_COLLECTED_S = 4.0
_MOST_TOKENS = 1024
"""Of a generation before it begins anew: a long context would hide what telemetry costs."""


@dataclass(frozen=True, slots=True)
class TelemetryPlan:
    """What to run: `tokens` decoded with telemetry and without in each repeat, after some to warm up."""

    tokens: int
    repeats: int


def bench_telemetry(config: EngineConfig, plan: TelemetryPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows to `report`: the decode rate with everything recorded, packed and written, against the rate without."""
    say("loading the model")
    with ExitStack() as held:
        loaded = held.enter_context(opened(config))
        # Stands for the window: everything sent is written, as in the engine process.
        nowhere = Path(os.devnull).open("wb")  # noqa: SIM115 - closed by the stack
        held.callback(nowhere.close)
        writer = EventWriter(nowhere.fileno(), on_broken=lambda: None)
        writer.start()
        held.callback(writer.close)
        service = TelemetryService(writer.send)
        held.callback(service.close)
        service.model_is(ModelTelemetry(loaded))
        held.callback(service.model_is, None)
        answer = _Answer(loaded)
        held.callback(answer.close)
        on, off = _rates(answer, service, plan, report, say)
        collecting = _collecting(answer, service, plan.tokens, say)
    on = [rate * (1 - collecting) for rate in on]
    added = report.add("decode, all telemetry on", on, "tokens/s", peer="telemetry off", peer_values=off)
    sure = "too few" if added.likely is None else "95%: {:.4f} to {:.4f}".format(*added.likely)
    say(
        f"the ratio, {plan.repeats} pairs of {plan.tokens} tokens, {sure} (target: at least {TARGET}); "
        f"{collecting:.2%} of it is for collecting"
    )


class _Answer:
    """One generation, in stretches."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._prompt: list[int] = loaded.tokenizer(_PROMPT)["input_ids"]
        self._scheduler, self._ids = Scheduler(loaded), list(self._prompt)

    def rate(self, tokens: int) -> float:
        if len(self._ids) > _MOST_TOKENS:
            self._ids = list(self._prompt)
        sampling = SamplingParams(max_tokens=tokens + 1)
        request = BatchRequest(0, ids=tuple(self._ids), sampling=sampling, end_ids=frozenset())
        result = self._scheduler.answer(request)
        self._ids += result.token_ids
        return result.tokens_per_s

    def close(self) -> None:
        self._scheduler.close()


def _rates(
    answer: _Answer, service: TelemetryService, plan: TelemetryPlan, report: Report, say: Callable[[str], None]
) -> tuple[list[float], list[float]]:
    """Tokens per second of each repeat, with telemetry and without."""
    say(f"{plan.repeats} stretches with telemetry, and as many without")
    dice = random.Random(17)

    def run(on: bool, _repeat: int) -> float:
        _switch(service, on=on)
        return answer.rate(plan.tokens)

    turns = {"on": partial(run, True), "off": partial(run, False)}
    rates = in_turn(
        turns,
        plan.repeats,
        report,
        lambda _turn: None,
        warm_ups=_WARM_UP,
        order=lambda _repeat, names: dice.sample(names, 2),
    )
    return rates["on"], rates["off"]


def _collecting(answer: _Answer, service: TelemetryService, tokens: int, say: Callable[[str], None]) -> float:
    """The part of the time for which what was recorded is collected, while everything is."""
    say("collecting")
    _switch(service, on=True)
    begun_s, used_s = time.perf_counter(), _collector_s()
    while time.perf_counter() < begun_s + _COLLECTED_S:
        answer.rate(tokens)
    if used_s is None or (now_s := _collector_s()) is None:
        say("not counted: this system does not tell a thread's processor time")
        return 0.0
    return (now_s - used_s) / (time.perf_counter() - begun_s)


def _collector_s() -> float | None:
    """Seconds of processor time of the thread that collects; `None` if there is none, or the system does not tell."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    thread = next((each for each in threading.enumerate() if each.name == "telemetry"), None)
    if clock is None or thread is None or thread.ident is None:
        return None
    return time.clock_gettime(clock(thread.ident))


def _switch(service: TelemetryService, *, on: bool) -> None:
    """Waits until it is so: the service acts on its own thread."""
    service.watch(WatchTelemetry(on, expert_map=on))
    give_up_s = time.monotonic() + _PATIENCE_S
    while RECORDER.on != on and time.monotonic() < give_up_s:
        time.sleep(0.001)
    used_s: float | None = -1.0
    while (now_s := _collector_s()) != used_s and time.monotonic() < give_up_s:
        used_s = now_s
        time.sleep(_SETTLES_S)
