"""A machine, measurements and an engine for tuning runs that take no time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.model_info import ModelInfo
from engine.hardware.measured import Arithmetic, ExpertTime, Measurements, RamRead, described
from engine.hardware.probe import Probe, Share
from engine.protocol import TuningNumber
from engine.tuning.measuring import MeasuredMachine
from engine.tuning.race import RacePace
from engine.tuning.result import DecodeRate
from engine.tuning.run import TuningSurroundings

MACHINE = Probe(
    os="Test OS 1",
    architecture="x86_64",
    cpu="Test CPU",
    physical_cores=4,
    logical_cores=8,
    usable_cpus=8,
    instructions=("avx2",),
    ram_bytes=16 * 2**30,
    ram_available_bytes=12 * 2**30,
    gpus=(),
    gpu_note="none",
    models_disk_free_bytes=2**40,
)
PACE = RacePace(tokens=4, seconds=1.0, repeats=2, again_s=1.0)


def tiny_model() -> Path:
    """A checkpoint of a few experts."""
    return make_synthetic("synthetic:qwen3-moe-tiny?layers=2")


def measurements(machine: Probe = MACHINE, device: str = "") -> Measurements:
    """Two cores read as fast as four."""
    times = tuple(
        ExpertTime("cpu", 2048, 768, precision, 1, threads, 10**7, 10**7 / rate)
        for precision in ("bf16", "int8", "int4")
        for threads, rate in ((1, 1e10), (2, 2e10), (4, 2e10))
    )
    on_device = (Arithmetic(device, 0, 1e12, 1e11),) if device else ()
    return Measurements(
        "quick",
        device,
        2**30 if device else 0,
        described(machine),
        "2026-11-21T08:00:00+00:00",
        ram=(RamRead(4, 2e10),),
        experts=times,
        arithmetic=(Arithmetic("cpu", 4, 1e11, 0.0), *on_device),
    )


class MadeUpEngine:
    """Loads anything at once and decodes at the rate that `speed` gives; keeps a diary.

    Args:
        speed: tokens/s of a configuration; an error is raised, by decoding or (`at_load`) by loading.
        step: called before each thing that it does, with its name.
    """

    def __init__(
        self,
        speed: Callable[[EngineConfig], float | Exception],
        *,
        at_load: bool = True,
        step: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self._speed, self._at_load, self._step = speed, at_load, step
        self.asked: EngineConfig | None = None
        self.info: ModelInfo | None = None
        self.diary: list[str] = []
        self.most_held = 0

    def load(
        self, config: EngineConfig, *, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> ModelInfo:
        return self._loaded("load", config, on_progress, cancelled)

    def load_exactly(
        self, config: EngineConfig, *, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> ModelInfo:
        return self._loaded("load_exactly", config, on_progress, cancelled)

    def unload(self) -> None:
        self.info = self.asked = None

    def time_decode(
        self, tokens: int, seconds: float, on_token: Callable[[int, float], None], cancelled: Callable[[], bool]
    ) -> DecodeRate:
        self._step("decode")
        assert self.asked is not None
        rate = self._speed(self.asked)
        if isinstance(rate, Exception):
            raise rate
        on_token(1, rate)
        return DecodeRate(0.0 if cancelled() else rate, 0.1, tokens)

    def _loaded(
        self,
        what: str,
        config: EngineConfig,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> ModelInfo:
        self.unload()
        self._step(what)
        self.diary.append(f"{what} {config.precision} {config.threads}")
        on_progress(1, 2)
        if cancelled():
            raise RequestCancelled
        rate = self._speed(config)
        if self._at_load and isinstance(rate, Exception):
            raise rate
        precision = "bf16" if config.precision == "auto" else config.precision
        device = "cpu" if config.device in ("auto", "cpu") else config.device
        self.asked = config
        self.info = ModelInfo("tiny", config.model, "f", device, precision, config.threads or 4, 1, 1, 4, 2, 9, 1, 1, 1)
        return self.info


def no_memory() -> EngineError:
    """As a model that does not fit."""
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "It needs 9 GB, but only 1 GB is free.")


def others_take(share: Callable[[], float]) -> Callable[[], Share]:
    """Other programs that take `share()` of the processor, asked at the end of each stretch."""
    return lambda: share


def around(
    machine: Probe = MACHINE, step: Callable[[str], None] = lambda _what: None, **changed: Any
) -> TuningSurroundings:
    """A machine that is measured at once."""

    def measure(
        _probe: Probe,
        config: EngineConfig,
        _kind: str,
        *,
        again: bool,
        before_measuring: Callable[[], None],
        on_progress: Callable[[str, float, TuningNumber | None], None],
        cancelled: Callable[[], bool],
    ) -> MeasuredMachine:
        step("measure")
        device = config.device if config.device.startswith("emulated") else ""
        if device:
            before_measuring()
        on_progress("RAM", 0.5, TuningNumber("ram", "4 threads", 2e10, "bytes/s"))
        if cancelled():
            raise RequestCancelled
        return MeasuredMachine(measurements(machine, device), device, kept=False)

    def look() -> Probe:
        step("look")
        return machine

    told = TuningSurroundings(
        look=look,
        measure=measure,
        paces=lambda _kind: PACE,
        now=lambda: "2026-11-21T09:00:00+00:00",
        watch=others_take(lambda: 0.0),
        pause=lambda _seconds: None,
    )
    return replace(told, **changed)
