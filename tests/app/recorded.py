"""Records and samples that an engine and sensors could have sent."""

import numpy as np

from app.services.device_monitor import DeviceMonitor
from engine.hardware.probe import GpuInfo, Probe
from engine.hardware.sensors import SensorSample
from engine.protocol import IN_RAM, IN_VRAM, ON_DISK, ExpertMap
from engine.telemetry.lanes import ATTENTION, CPU_ATTENTION, CPU_EXPERTS, DECODE, EXPERTS, FETCH, GPU, H2D
from engine.telemetry.records import SPAN, STEP, Records, pack

STEP_NS = 20_000_000


def decoded(steps: int, start_ns: int, *, layers: int = 4, on_device: bool = False) -> tuple[Records, Records]:
    """Spans and steps of a decode without gaps: in each layer attention, then experts, and copies on a device."""
    spans, layer_ns = [], STEP_NS // layers
    for step in range(steps):
        for layer in range(layers):
            begin = start_ns + step * STEP_NS + layer * layer_ns
            middle = begin + layer_ns // 3
            spans.append((begin, middle, 0, 1, step, layer, -1, 1, GPU if on_device else CPU_ATTENTION, 0, ATTENTION))
            spans.append((middle, begin + layer_ns, 0, 1, step, layer, -1, 7, CPU_EXPERTS, 0, EXPERTS))
            if on_device:
                spans.append((begin, begin + layer_ns // 2, 10_000, 1, step, layer, 3, 1, H2D, 0, FETCH))
    records = np.zeros(steps, STEP)
    records["start_ns"] = start_ns + np.arange(steps) * STEP_NS
    records["end_ns"] = records["start_ns"] + STEP_NS
    records["request"], records["step"] = 1, np.arange(steps)
    records["name"], records["tokens"] = DECODE, 1
    records["on_cpu"], records["hits"] = 20, 8 if on_device else 0
    return np.array(spans, SPAN), records


def sample(at_s: float = 0.0, busy: float = 0.5) -> SensorSample:
    """A machine of two cores without a card."""
    return SensorSample(at_s, (), (busy, busy), 1.0, ram_used=2**32, ram_total=2**34, ram_ours=2**30, minor_faults=10.0)


class SteadySensors:
    """Sensors that always say the same."""

    def __init__(self, says: SensorSample | None = None) -> None:
        self._says = says or sample()

    def sample(self) -> SensorSample:
        return self._says

    def close(self) -> None:
        """Nothing is held."""


def machine(*gpus: GpuInfo, gpu_note: str = "") -> Probe:
    """A desktop of 8 cores and 32 GB."""
    return Probe(
        os="Linux", architecture="x86_64", cpu="AMD Ryzen(TM) 7 7700 8-Core Processor @ 3.8GHz", physical_cores=8,
        logical_cores=16, usable_cpus=16, instructions=(), ram_bytes=2**35, ram_available_bytes=2**34,
        gpus=gpus, gpu_note=gpu_note, models_disk_free_bytes=None,
    )  # fmt: skip


def steady_devices(says: SensorSample | None = None, found: Probe | None = None) -> DeviceMonitor:
    """A machine whose sensors always say the same."""
    return DeviceMonitor(make_sensors=lambda: SteadySensors(says), look=lambda: found or machine())


def expert_map(rows: int = 3, columns: int = 8) -> ExpertMap:
    """A map in which each row's experts are used the more the higher their number."""
    heat = np.broadcast_to(np.arange(columns) * 255 // columns, (rows, columns)).astype(np.uint8)
    places = np.broadcast_to(np.arange(columns) % 3, (rows, columns))
    places = np.choose(places, [IN_VRAM | IN_RAM, IN_RAM, ON_DISK]).astype(np.uint8)
    counts = heat.astype(np.uint32)
    packed = [pack(part.reshape(-1)) for part in (heat, places, counts, counts // 2, counts)]
    return ExpertMap(tuple(range(rows)), columns, 300, 9.0, *packed, (2**20,) * rows)
