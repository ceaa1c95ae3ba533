"""Made-up machines, plans and results for tests of the Tune page."""

from dataclasses import replace

from engine.checkpoint.model_shape import read_model
from engine.common.config import EngineConfig
from engine.hardware.cpu import CpuInfo
from engine.hardware.disk import DiskInfo, DiskKind
from engine.hardware.gpu_info import GpuInfo
from engine.hardware.measured import (
    Arithmetic,
    CopyTime,
    DiskRead,
    ExpertTime,
    Measurements,
    RamRead,
    described,
    machine_profile,
)
from engine.hardware.probe import Probe
from engine.planner.plan import make_plan
from engine.planner.plan_parts import Limits, Plan
from engine.tuning.machine_state import MachineLook
from engine.tuning.result import Contestant, Timed, TuningResult
from engine.tuning.saved_results import facts

GIB = 2**30


def gpu(name: str = "NVIDIA GeForce RTX 4060", **other: object) -> GpuInfo:
    """A card with 8 GB of which 6.9 are free."""
    card = GpuInfo(name, 8 * GIB, round(6.9 * GIB), "581.57", "8.9", 4, 8, pcie_width_now=8, memory_bytes_per_s=272e9)
    return replace(card, **other)  # type: ignore[arg-type]


def probe(*gpus: GpuInfo, cpu: str | None = "AMD Ryzen 7 7700 8-Core Processor", disk: bool = True) -> Probe:
    """A machine with 32 GB and 8 cores."""
    return Probe(
        os="Debian",
        architecture="x86_64",
        cpu=cpu,
        physical_cores=8,
        logical_cores=16,
        usable_cpus=16,
        instructions=("avx2", "fma", "avx512f", "avx512_vnni"),
        ram_bytes=32 * GIB,
        ram_available_bytes=21 * GIB,
        gpus=gpus,
        gpu_note="" if gpus else "No NVIDIA driver was found.",
        models_disk_free_bytes=410 * GIB,
        processor=CpuInfo(cpu, 8, 16, None, None, None, None, ("avx2",), None, 1),
        models_disk=DiskInfo("/models", DiskKind.NVME, 1000 * GIB, 410 * GIB, "Samsung SSD 990 PRO 2TB")
        if disk
        else None,
    )


def measurements(of: Probe, device: str = "cuda:0") -> Measurements:
    """Of everything, with a note about drift."""
    experts = tuple(
        ExpertTime("cpu", 2048, 768, precision, 1, threads, nbytes, nbytes / (rate * 1e9))
        for precision, nbytes in (("bf16", 9_437_184), ("int8", 5_013_504), ("int4", 2_801_664))
        for threads, rate in ((1, 18.0), (6, 57.0), (8, 55.0))
    )
    copies = tuple(
        CopyTime(device, way, True, False, nbytes, 1e-5 + nbytes / rate)
        for way, rate in (("h2d", 12.4e9), ("d2h", 12.9e9))
        for nbytes in (2**20, 2**26)
    )
    cards = (Arithmetic(device, 0, 4.2e13, 2.4e11),) if device else ()
    return Measurements(
        kind="quick",
        device=device,
        device_bytes=8 * GIB if device else 0,
        machine=described(of),
        taken_at="2026-11-21T07:00:00+00:00",
        ram=(RamRead(1, 21e9), RamRead(8, 58e9)),
        experts=experts,
        copies=copies if device else (),
        disk=(DiskRead(8, 2**20, True, 3.2e9),),
        arithmetic=(Arithmetic("cpu", 8, 9.1e11, 0.0), *cards),
        pinned_limit_bytes=14 * GIB if device else None,
        notes=("The processor became 12% slower while it was measured (heat, battery or other programs).",),
    )


def look(*gpus: GpuInfo, measured: bool = True, changed: tuple[str, ...] = ()) -> MachineLook:
    """A look at such a machine."""
    found = probe(*gpus)
    device = "cuda:0" if gpus else ""
    taken = measurements(found, device) if measured else None
    return MachineLook(found, device, taken, machine_profile(found, taken), changed)


def plan(of: MachineLook, model: str = "qwen3-30b-a3b") -> Plan:
    """A plan for a model that comes with the program; made once, for it takes half a second."""
    key = repr((of, model))
    if key not in _plans:
        limits = Limits(use_card=bool(of.device), precision="int4", vram_of_others=GIB, ram_of_others=5 * GIB)
        _plans[key] = make_plan(of.machine("int4"), read_model(model), limits=limits, measured=True)
    return _plans[key]


_plans: dict[str, Plan] = {}


def contestant(name: str, predicted: float = 20.0, **other: bool) -> Contestant:
    """Predicted to a seventh."""
    return Contestant(name, EngineConfig("/models/m"), predicted, 0.85 * predicted, 1.15 * predicted, **other)


CONTESTANTS = (
    contestant("int4, Switchyard mixed, 6 threads", 23.8, is_plan=True),
    contestant("int4, Switchyard mixed, static, 4 ways, 6 threads", 22.1),
    contestant("int4, CPU only, 8 threads", 13.2, is_before=True),
)


def timed(of: Contestant, rate: float, problem: str = "") -> Timed:
    """Three repeats, or a failure."""
    if problem:
        return Timed(of, problem=problem)
    return Timed(of, rate, (0.98 * rate, rate, 1.01 * rate), 0.4, 12.0, "cuda:0", "int4", 6)


def result(of: MachineLook | None = None) -> TuningResult:
    """The plan won, one could not be run, the CPU lost."""
    here = of or look(gpu())
    plan_way, static, cpu = CONTESTANTS
    return TuningResult(
        model="Qwen3-30B-A3B",
        model_mark="0123456789abcdef",
        asked=EngineConfig("/models/m"),
        kind="quick",
        taken_at="2026-11-21T07:10:00+00:00",
        machine=facts(described(here.probe)),
        timed=(
            timed(plan_way, 24.6),
            timed(cpu, 13.9),
            timed(static, 0.0, "There is no room for 4 ways of every layer: 7.9 GB are needed and 6.9 GB are free."),
        ),
        winner=plan_way.name,
    )
