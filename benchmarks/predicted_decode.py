"""`switchyard bench decode --predict`: the planner's predicted decode speed against the measured one.

The machine is measured and the model timed alternately in many short runs, and the best of both counts: other programs
can only slow things down. The text is fixed beforehand: random for models with random weights, so that their routing
does not loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.shared_experts import recorded_routing, with_quarter_resident
from engine.bench.opened import ForcedText, decode_seconds, opened, own_text, random_text, resolve_model
from engine.bench.report import Report, ReportRow, row
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.synthetic import is_synthetic
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.paths import models_dir
from engine.devices.opening import open_devices
from engine.formats import LADDER
from engine.hardware.measured import CopyTime, Measurements, machine_profile
from engine.hardware.probe import Probe, probe
from engine.measure.arithmetic import (
    CpuArithmetic,
    CpuExperts,
    DeviceArithmetic,
    NativeCalls,
    RamBandwidth,
    SharedLayer,
)
from engine.measure.link import Copies
from engine.measure.measuring import THOROUGH_SHAPES, cold_bytes, one_and_all
from engine.measure.run import Measurement, NotMeasuredError, Run
from engine.planner.predict import predict_decode

if TYPE_CHECKING:
    from engine.checkpoint.model_shape import ModelShape
    from engine.devices.device import Device

_MIB = 2**20
_PROMPT_TOKENS = 32
_PASS_S = 1.5
_SAMPLES = 8
_MODELS = (
    "starter",
    "synthetic:qwen3-30b-a3b?layers=2&vocab=4096",
    "synthetic:olmoe-1b-7b?layers=2&vocab=4096",
    "synthetic:mixtral-8x7b?layers=1&vocab=4096",
)
_DEVICES = ("cpu", "emulated:pcie3-x8-8gb")


@dataclass(frozen=True, slots=True)
class PredictionPlan:
    """`models` (none: a default set of shapes), each in all `precisions` and on all `devices`; see `bench decode`."""

    tokens: int
    repeats: int
    models: tuple[str, ...] = ()
    precisions: tuple[str, ...] = LADDER
    devices: tuple[str, ...] = _DEVICES


def bench_predictions(config: EngineConfig, plan: PredictionPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds a row for each model, precision and device: tokens/s, and the deviation of the prediction.

    Args:
        config: other settings; its model, precision and device are ignored.
    """
    machine = probe()
    for model in plan.models or _MODELS:
        path = resolve_model(model, say)
        shape = find_shape(str(path))
        for device in plan.devices:
            for precision in plan.precisions:
                case = replace(config, model=str(path), device=device, precision=precision)
                name = f"{model.removeprefix('synthetic:').partition('?')[0]}, {precision}, {device}"
                say(name)
                try:
                    found = _case(name, case, shape, plan, machine, has_own_text=not is_synthetic(model))
                except EngineError as error:
                    report.skip_peer(name, error.message)
                except (
                    NotMeasuredError,
                    MemoryError,
                    RuntimeError,
                    OSError,
                ) as error:  # affects only this case
                    report.skip_peer(name, (str(error).strip().splitlines() or [type(error).__name__])[0])
                else:
                    report.rows.append(found)
                    say(f"  {found.value:.1f} tokens/s, predicted {found.predicted:.1f}: {found.deviation:+.0%}")


def _case(
    name: str,
    config: EngineConfig,
    shape: ModelShape,
    plan: PredictionPlan,
    machine: Probe,
    *,
    has_own_text: bool,
) -> ReportRow:
    with ExitStack() as stack:
        device: Device | None = None
        if config.device != "cpu":
            config = with_quarter_resident(config)
            device = stack.enter_context(open_devices(config.device, config.vram_bytes)[0])
        loaded = stack.enter_context(opened(config))
        vocabulary = loaded.model.config.get_text_config().vocab_size

        def text(number: int) -> ForcedText:
            """A different text each time: the cache must not have seen the timed one."""
            drawn = random_text(vocabulary, _PROMPT_TOKENS, plan.tokens, seed=number)
            return own_text(loaded, drawn.prompt, plan.tokens) if has_own_text else drawn

        decode_seconds(loaded, text(0), _PASS_S)  # fills the cache and lets its policy settle
        with recorded_routing(loaded.model) as recorder:
            decode_seconds(loaded, text(1), _PASS_S)
        rates, rounds = [], []
        for number in range(plan.repeats):
            rounds.append(_measured(machine, config, device))
            steps = decode_seconds(loaded, text(2 + number), _PASS_S)[1:]
            # Without a cache all steps are equal, so the fastest was disturbed least; with a cache they vary.
            rates.append(1 / min(steps) if device is None else len(steps) / sum(steps))
        size = shape.expert_bytes(config.precision)
        profile = machine_profile(machine, _together(rounds), precision=config.precision, expert_bytes=size)
        found = predict_decode(
            profile, shape, config, prompt_tokens=_PROMPT_TOKENS, tokens=plan.tokens, routing=recorder.chosen()
        )
        return row(name, [max(rates)], "tokens/s", predicted=found.tokens_per_s)


def _together(rounds: Sequence[Measurements]) -> Measurements:
    """Merges all rounds: the planner takes the best bandwidths, and the fastest copies are kept."""
    quickest: dict[tuple[str, bool, bool, int], CopyTime] = {}
    for copy in (copy for found in rounds for copy in found.copies):
        key = (copy.direction, copy.pinned, copy.both_ways, copy.nbytes)
        if key not in quickest or copy.seconds < quickest[key].seconds:
            quickest[key] = copy
    return replace(
        rounds[-1],
        ram=tuple(entry for found in rounds for entry in found.ram),
        experts=tuple(entry for found in rounds for entry in found.experts),
        arithmetic=tuple(entry for found in rounds for entry in found.arithmetic),
        calls=tuple(entry for found in rounds for entry in found.calls),
        copies=tuple(quickest.values()),
    )


def _measured(machine: Probe, config: EngineConfig, device: Device | None) -> Measurements:
    """The parts of a thorough measurement that decoding needs, for common shapes."""
    threads = config.threads
    # Always with all threads, which an emulated card shares with the CPU.
    counts = (lambda most: tuple(sorted({threads, most}))) if threads is not None else one_and_all
    of_cpu: Sequence[Measurement] = (
        RamBandwidth(counts, _SAMPLES, 0.6),
        CpuArithmetic(_SAMPLES, 0.4),
        NativeCalls(counts, _SAMPLES, 0.1),
        CpuExperts(THOROUGH_SHAPES, (config.precision,), (1,), counts, 2 * _SAMPLES, 3.0),
    )
    of_device: Sequence[Measurement] = (
        DeviceArithmetic(_SAMPLES, 0.6),
        SharedLayer(_SAMPLES, 0.3),
        Copies((64 * 2**10, 4 * _MIB, 32 * _MIB), _SAMPLES, 1.0),
    )
    cores = max(1, min(machine.physical_cores or machine.usable_cpus, machine.usable_cpus))
    run = _AtItsBest(device, models_dir(), cores, cold_bytes(machine, 256 * _MIB), lambda: False, lambda *_: None)
    for measurement in (*of_cpu, *(of_device if device is not None else ())):
        measurement(run)
    return Measurements(
        kind="quick",
        device="" if device is None else device.name.partition("#")[0],
        device_bytes=0 if device is None else device.memory.total,
        machine={},
        taken_at="",
        **run.rows_by_kind(),
    )


class _AtItsBest(Run):
    """Takes the fastest of short repeats instead of the median, which needs an idle machine."""

    def steady(self, name: str, once: Callable[[], float], repeats: int = 5) -> float:  # noqa: ARG002 - as in `Run`
        once()
        return min(once() for _ in range(repeats))
