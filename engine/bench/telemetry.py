"""`switchyard bench telemetry`: the cost of telemetry: decode with it on and off, in turn."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.bench.report import Report, row
from engine.common.config import EngineConfig, SamplingParams
from engine.process.streams import EventWriter
from engine.process.telemetry import TelemetryService
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.alone import Alone
from engine.runtime.telemetry.model_telemetry import ModelTelemetry
from engine.telemetry.messages import WatchTelemetry
from engine.telemetry.recorder import RECORDER

TARGET = 0.99
"""Required fraction of the speed without telemetry."""
_PROMPT = "A railway switchyard sorts freight cars. Explain in plain words how the hump and the switches work."
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class TelemetryPlan:
    """What to run: `tokens` decoded with telemetry and without in each repeat, after one warm-up."""

    tokens: int
    repeats: int


def bench_telemetry(config: EngineConfig, plan: TelemetryPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows to `report`: the decode rate with everything recorded, packed and written, against the rate without.

    The order alternates, so that neither gains from a machine that warms up or slows down.
    """
    say("loading the model")
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    with ExitStack() as opened:
        opened.callback(loaded.close)
        # Stands for the window: everything sent is written, as in the engine process.
        nowhere = Path(os.devnull).open("wb")  # noqa: SIM115 - closed by the stack
        opened.callback(nowhere.close)
        writer = EventWriter(nowhere.fileno(), on_broken=lambda: None)
        writer.start()
        opened.callback(writer.close)
        service = TelemetryService(writer.offer, writer.publish, writer.send)
        opened.callback(service.close)
        service.model_is(ModelTelemetry(loaded))
        opened.callback(service.model_is, None)
        rates = _rates(loaded, service, plan, say)
    low, high = median_interval([on / off for on, off in zip(rates[True], rates[False], strict=True)])
    say(f"95% confidence of the ratio, {plan.repeats} pairs: {low:.4f} to {high:.4f} (target: at least {TARGET})")
    report.rows.append(
        row("decode, all telemetry on", rates[True], "tokens/s", peer="telemetry off", peer_values=rates[False])
    )


def median_interval(values: list[float]) -> tuple[float, float]:
    """The two of the values, [n] with n at least 1, that bound the true median at about 95% confidence.

    By order statistics, without assumptions on the distribution.  Few values give the whole range.
    """
    ordered, count = sorted(values), len(values)
    out = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[out], ordered[count - 1 - out]


def _rates(
    loaded: LoadedModel, service: TelemetryService, plan: TelemetryPlan, say: Callable[[str], None]
) -> dict[bool, list[float]]:
    prompt = loaded.tokenizer(_PROMPT)["input_ids"]
    session = Alone(loaded)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(plan.repeats + 1):
        say(f"repeat {repeat} of {plan.repeats}" if repeat else "warm-up")
        for on in (True, False) if repeat % 2 else (False, True):
            _switch(service, on=on)
            result = session.generate_from_ids(prompt, SamplingParams(max_tokens=plan.tokens + 1), end_ids=frozenset())
            if repeat:
                rates[on].append(result.tokens_per_s)
    session.clear()
    return rates


def _switch(service: TelemetryService, *, on: bool) -> None:
    """Waits until it is so: the service acts on its own thread."""
    service.watch(WatchTelemetry(on, expert_map=on))
    give_up_s = time.monotonic() + _PATIENCE_S
    while RECORDER.on != on and time.monotonic() < give_up_s:
        time.sleep(0.01)
