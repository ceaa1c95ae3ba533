"""Measuring: right numbers from a device whose numbers are known, repeats where something drifts, nothing left."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.devices.device import Device
from engine.devices.emulated import open_emulated
from engine.devices.memory_budget import MemoryCategory
from engine.hardware.measured import DiskRead, Measurements, RamRead, machine_profile
from engine.hardware.probe import Probe, probe
from engine.hardware.profiles import DeviceProfile, read_profile
from engine.measure.arithmetic import (
    CardExpertTimes,
    CpuArithmetic,
    CpuExperts,
    DeviceArithmetic,
    ExpertShape,
    NativeCalls,
    RamBandwidth,
    SharedLayer,
)
from engine.measure.link import Copies, DiskReads, PinnedLimit, scratch_file
from engine.measure.measuring import MeasurementSet, measure_machine
from engine.measure.run import (
    Measurement,
    NotMeasuredError,
    OnProgress,
    Row,
    Run,
    thread_counts,
)

MIB = 2**20
SMALL = ExpertShape(64, 32)
PRECISIONS = ("bf16", "int8", "int4")


@pytest.fixture(scope="module")
def machine() -> Probe:
    # Several threads that wait for each other are slow where others compute; large caches want a lot of memory.
    found = probe()
    assert found.processor is not None
    return replace(found, physical_cores=1, processor=replace(found.processor, l3_bytes=MIB))


@pytest.fixture
def slow_link() -> Iterator[Device]:
    with open_emulated(read_profile("slow-link"), vram_bytes=64 * MIB) as device:
        yield device


class Steady:
    """A machine that never slows down."""

    def __call__(self) -> float:
        return 1.0


@dataclass
class Slowing:
    """Takes these seconds, one after the other."""

    seconds: list[float]

    def __call__(self) -> float:
        return self.seconds.pop(0)


@dataclass
class Made:
    """A measurement that finds what it is told to, or raises it."""

    name: str
    work: Callable[[Run], None]
    estimated_s: float = 1.0
    calls: int = field(default=0)

    def __call__(self, run: Run) -> None:
        self.calls += 1
        self.work(run)


def measure(
    machine: Probe,
    folder: Path,
    *measurements: Measurement,
    device: Device | None = None,
    throttling: object = None,
    others: Callable[[], int | None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
    on_progress: OnProgress = lambda _name, _done, _found: None,
) -> Measurements:
    return measure_machine(
        MeasurementSet("test", 4 * MIB, measurements),
        machine,
        device,
        folder,
        throttling=throttling or Steady(),  # type: ignore[arg-type]
        others_bytes=others,
        cancelled=cancelled,
        on_progress=on_progress,
    )


def a_run(folder: Path, *, device: Device | None = None, clock: Callable[[], float] = lambda: 0.0) -> Run:
    return Run(device, folder, 1, 4 * MIB, lambda: False, lambda *_: None, clock=clock)


@pytest.mark.parametrize(
    "profile",
    [
        read_profile("slow-link"),
        read_profile("pcie3-x8-8gb"),
        DeviceProfile("made-up", "slow back", 2**28, 1.0, 0.5, 200.0),
    ],
    ids=lambda profile: profile.name,
)
def test_an_emulated_devices_link_is_found_again(machine: Probe, tmp_path: Path, profile: DeviceProfile) -> None:
    copies = Copies((64 * 2**10, MIB, 8 * MIB), 9, 30.0)
    with open_emulated(profile) as device:
        roomy = MeasurementSet("test", 64 * MIB, (copies,))
        found = measure_machine(roomy, machine, device, tmp_path, throttling=Steady(), others_bytes=lambda: None)
        assert device.memory.use().used == 0
    assert found.skipped == {}
    link = machine_profile(machine, found).link
    assert link.h2d == pytest.approx(profile.link_h2d_gbps * 1e9, rel=0.15)
    assert link.d2h == pytest.approx(profile.link_d2h_gbps * 1e9, rel=0.15)
    assert link.h2d_pageable == pytest.approx(link.h2d, rel=0.15)
    assert link.latency_s == pytest.approx(profile.link_latency_us / 1e6, rel=0.5, abs=10e-6)
    # Both directions have links of their own, so neither is slower for the other.
    both = {copy.direction: copy for copy in found.copies if copy.both_ways and copy.nbytes == 8 * MIB}
    assert set(both) == {"h2d", "d2h"}
    assert both["h2d"].nbytes / both["h2d"].seconds == pytest.approx(profile.link_h2d_gbps * 1e9, rel=0.3)
    assert (found.device, found.device_bytes) == (f"emulated:{profile.name}", profile.vram_bytes)


def test_everything_is_measured_on_the_cpu_and_a_device(machine: Probe, slow_link: Device, tmp_path: Path) -> None:
    told: list[tuple[float, Row | None]] = []
    found = measure(
        machine,
        tmp_path / "models",
        RamBandwidth(lambda most: (1,), 2, 60.0),
        CpuArithmetic(2, 60.0),
        CpuExperts((SMALL,), PRECISIONS, (1, 4), lambda most: (most,), 2, 60.0),
        DeviceArithmetic(2, 60.0),
        CardExpertTimes((SMALL,), PRECISIONS, (1, 4), 2, 60.0),
        DiskReads(4 * MIB, (1, 3), (MIB, 2 * MIB), 3, 60.0),
        PinnedLimit(2**30, 1.0),
        device=slow_link,
        on_progress=lambda _name, done, row: told.append((done, row)),
    )
    assert list(found.skipped) == ["pinned memory"]
    assert [(row.depth, row.nbytes) for row in found.disk] == [(1, 2 * MIB), (3, 2 * MIB), (1, MIB), (3, MIB)]
    kinds = {(row.device, row.precision, row.tokens) for row in found.experts}
    assert len(kinds) == 2 * 3 * 2
    assert all(row.seconds > 0 for row in found.experts)
    assert {row.device for row in found.arithmetic} == {"cpu", "emulated:slow-link"}
    assert slow_link.memory.use().used == 0
    assert not (tmp_path / "models").exists()
    done = [each for each, _ in told]
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert sum(row is not None for _, row in told) == sum(
        map(len, (found.ram, found.experts, found.disk, found.arithmetic))
    )
    origins = machine_profile(machine, found).origins
    assert {origins[name] for name in ("cpu.flops", "gpu.flops", "disk_bytes_per_s")} == {"measured"}


def test_the_engines_own_calls_are_timed(machine: Probe, slow_link: Device, tmp_path: Path) -> None:
    found = measure(machine, tmp_path, NativeCalls(lambda most: (1,), 2, 60.0), SharedLayer(2, 60.0), device=slow_link)
    assert found.skipped == {}
    calls = machine_profile(machine, found).calls
    assert all(getattr(calls, name) > 0 for name in ("native_s", "router_s", "layer_s", "single_s"))
    assert calls.layer_s > calls.native_s  # it waits for a copy
    assert slow_link.memory.use().used == 0
    assert measure(machine, tmp_path, SharedLayer(2, 60.0)).skipped  # no card to share with


def test_without_a_device_its_part_is_skipped_with_a_reason(machine: Probe, tmp_path: Path) -> None:
    found = measure(machine, tmp_path, Copies((MIB,), 1, 1.0), DeviceArithmetic(1, 1.0))
    assert set(found.skipped) == {"link to the graphics card", "graphics card"}
    assert all("graphics card" in reason for reason in found.skipped.values())
    assert (found.device, found.copies) == ("", ())


@pytest.mark.parametrize(
    "error",
    [
        EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "No memory."),
        OSError(28, "No space left on device"),
        MemoryError("none"),
        RuntimeError("CUDA error: out of memory\nmore"),
        NotMeasuredError("no sense here"),
    ],
)
def test_what_fails_is_skipped_and_the_rest_goes_on(machine: Probe, tmp_path: Path, error: Exception) -> None:
    def failing(run: Run) -> None:
        raise error

    found = measure(machine, tmp_path, Made("bad", failing), Made("good", lambda run: run.found(RamRead(1, 2.0))))
    assert list(found.skipped) == ["bad"]
    assert "\n" not in found.skipped["bad"]
    assert found.ram == (RamRead(1, 2.0),)


def test_a_full_device_is_skipped(machine: Probe, tmp_path: Path) -> None:
    with open_emulated(read_profile("slow-link"), vram_bytes=8 * MIB) as device:
        held = device.memory.allocate(8 * MIB, MemoryCategory.WEIGHTS)
        found = measure(machine, tmp_path, Copies((MIB,), 1, 1.0), DeviceArithmetic(1, 9.0), device=device)
        device.memory.release(held)
    assert all("memory" in reason for reason in found.skipped.values())
    assert len(found.skipped) == 2


@pytest.mark.parametrize("after", range(0, 60, 7))
def test_cancelling_leaves_nothing(
    machine: Probe, slow_link: Device, tmp_path: Path, switchyard_home: Path, after: int
) -> None:
    asked = itertools.count()
    with pytest.raises(RequestCancelled):
        measure(
            machine,
            tmp_path / "models",
            DiskReads(8 * MIB, (1, 2), (MIB,), 2, 60.0),
            Copies((2**16, MIB), 2, 60.0),
            CardExpertTimes((SMALL,), ("bf16",), (1,), 2, 60.0),
            *(Made(str(number), lambda run: run.check()) for number in range(60)),
            device=slow_link,
            cancelled=lambda: next(asked) >= after,
        )
    assert slow_link.memory.use().used == 0
    assert not (tmp_path / "models").exists()
    assert not (switchyard_home / "data" / "measurements").exists()


def test_a_processor_that_slows_down_is_measured_again_and_it_is_said(machine: Probe, tmp_path: Path) -> None:
    rates = iter([9.0, 5.0])
    ram = Made("RAM", lambda run: run.found(RamRead(1, next(rates))))
    disk = Made("disk", lambda run: run.found(DiskRead(1, 1, True, 3.0)))
    found = measure(machine, tmp_path, ram, disk, throttling=Slowing([1.0, 1.5, 1.52]))
    assert found.ram == (RamRead(1, 5.0),)
    assert (ram.calls, disk.calls) == (2, 1)
    assert found.unsteady == {}
    (note,) = found.notes
    assert "33% slower" in note
    assert "measured again" in note


@pytest.mark.parametrize(
    ("before", "after", "said"), [(2**30, 3 * 2**30, True), (2**30, 2**30 + MIB, False), (None, 5, False)]
)
def test_other_programs_video_memory(
    machine: Probe, tmp_path: Path, before: int | None, after: int, said: bool
) -> None:
    amounts = iter([before, after])
    found = measure(machine, tmp_path, others=lambda: next(amounts))
    assert any("1.0 GiB" in note and "3.0 GiB" in note for note in found.notes) == said


def test_steady_repeats_what_drifts_and_keeps_how_it_goes_on(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    values = iter([9.0, 1.0, 1.0, 1.3, 1.4, 1.5, 1.5, 1.5, 1.5, 1.52, 1.5])
    assert run.steady("hot", lambda: next(values), 5) == 1.5
    assert run.repeated == {"hot"}
    assert run.unsteady == {}


def test_what_takes_too_long_is_repeated_no_more_and_then_ended(tmp_path: Path) -> None:
    now = [0.0]
    run = a_run(tmp_path, clock=lambda: now[0])
    calls = itertools.count()

    def once() -> float:
        now[0] += 4.0
        return float(next(calls))

    run.allow(3.0)
    run.steady("slow", once, 5)
    assert next(calls) == 2  # one warms up, one counts
    with pytest.raises(NotMeasuredError, match="too long"):
        run.steady("slow", once, 5)


def test_a_scratch_file_goes_whatever_happens(tmp_path: Path) -> None:
    stale, other = tmp_path / ".switchyard-measuring-old", tmp_path / ".switchyard-measuring-new"
    stale.write_text("x")
    other.write_text("x")
    os.utime(stale, (0, 0))
    with contextlib.suppress(KeyError), scratch_file(tmp_path) as path:
        assert path.exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == [other]


def test_a_disk_that_is_nearly_full_is_left_alone(machine: Probe, tmp_path: Path) -> None:
    found = measure(machine, tmp_path, DiskReads(2**60, (1,), (MIB,), 2, 1.0))
    assert "nearly full" in found.skipped["disk"]
    assert list(tmp_path.iterdir()) == []


def test_of_an_expert_that_is_too_big_a_narrower_part_is_measured(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    CpuExperts((ExpertShape(2048, 768),), ("int4",), (1,), lambda _most: (1,), 2, 10.0)(run)
    (found,) = run.rows
    assert (found.hidden, found.inner) == (2048, 384)
    assert 2 * found.nbytes <= run.cold_bytes
    with pytest.raises(NotMeasuredError, match="RAM"):
        CpuExperts((ExpertShape(2048, 768),), ("bf16",), (1,), lambda _most: (1,), 2, 10.0)(run)


@pytest.mark.parametrize(("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_numbers_of_threads(most: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(most) == counts


def test_a_processor_that_goes_on_slowing_down_is_uncertain(machine: Probe, tmp_path: Path) -> None:
    found = measure(machine, tmp_path, throttling=Slowing([1.0, 1.5, 3.0]))
    assert any("uncertain" in note for note in found.notes)
    assert found.unsteady
