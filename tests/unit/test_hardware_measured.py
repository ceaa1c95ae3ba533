"""What was measured is kept whole, noticed to be of another machine, and becomes the planner's numbers."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.hardware.cpu import CpuInfo
from engine.hardware.disk import DiskInfo, DiskKind
from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.machine import Origin, assumed_card, assumed_link, card_key, known_cards
from engine.hardware.measured import (
    Arithmetic,
    CopyTime,
    DiskRead,
    ExpertTime,
    Measurements,
    RamRead,
    changes,
    described,
    load_measurements,
    machine_profile,
    measured_ceilings,
    read_measurements,
    save_measurements,
)
from engine.hardware.probe import Probe

GIB = 2**30
RTX = GpuInfo(
    "NVIDIA GeForce RTX 4060 Laptop GPU", 8 * GIB, 7 * GIB, "580.65", "8.9", 4, 16, pcie_generation_now=1,
    pcie_width_now=8,
)  # fmt: skip
PROBE = Probe(
    os="Linux",
    architecture="x86_64",
    cpu="A processor",
    physical_cores=8,
    logical_cores=16,
    usable_cpus=16,
    instructions=("avx2", "fma"),
    ram_bytes=32 * GIB,
    ram_available_bytes=20 * GIB,
    gpus=(RTX,),
    gpu_note="",
    models_disk_free_bytes=GIB,
    processor=CpuInfo("A processor", 8, 16, max_hz=4e9),
    models_disk=DiskInfo("/", DiskKind.NVME, GIB, GIB, "WD 850", "nvme0n1", "ext4"),
)


def copies(rate: float, latency_s: float, direction: str, *, pinned: bool) -> tuple[CopyTime, ...]:
    return tuple(
        CopyTime("cuda:0", direction, pinned, False, size, latency_s + size / rate) for size in (2**16, 2**22, 2**25)
    )


def measured(device: str = "cuda:0", probe: Probe = PROBE) -> Measurements:
    return Measurements(
        kind="quick",
        device=device,
        device_bytes=4 * GIB,
        machine=described(probe),
        taken_at="2026-11-21T06:00:00+00:00",
        ram=(RamRead(1, 12e9), RamRead(8, 50e9)),
        experts=(
            ExpertTime("cpu", 2048, 768, "bf16", 1, 8, 9_437_184, 9_437_184 / 40e9),
            ExpertTime("cpu", 2048, 768, "int4", 1, 8, 2_801_664, 2_801_664 / 30e9),
            ExpertTime("cpu", 2880, 2880, "bf16", 1, 8, 2**20, 2**20 / 44e9),
            ExpertTime("cpu", 2048, 768, "bf16", 16, 8, 9_437_184, 1.0),
            ExpertTime(device, 2048, 768, "bf16", 1, 0, 9_437_184, 1e-4),
        ),
        copies=(
            *copies(12e9, 1e-5, "h2d", pinned=True),
            *copies(11e9, 1e-5, "d2h", pinned=True),
            *copies(6e9, 2e-5, "h2d", pinned=False),
        ),
        disk=(DiskRead(1, 2**21, True, 2e9), DiskRead(8, 2**21, True, 3.4e9)),
        arithmetic=(Arithmetic("cpu", 8, 0.9e12, 0.0), Arithmetic(device, 0, 40e12, 240e9)),
        pinned_limit_bytes=16 * GIB,
        skipped={"pinned memory": "why"},
        notes=("a note",),
    )


def test_without_measurements_every_number_says_that_it_is_assumed_or_told() -> None:
    machine = machine_profile(PROBE)
    assert (machine.gpu.memory_bytes, machine.cpu.cores, machine.cpu.ram_bytes) == (8 * GIB, 8, 32 * GIB)
    assert (machine.gpu.flops, machine.gpu.bytes_per_s) == (46e12, 256e9)
    assert machine.link.h2d == pytest.approx(12.6e9, rel=0.01)  # x8 now, whatever the slot could
    assert machine.disk_bytes_per_s == 3e9
    assert set(machine.origins.values()) == {Origin.ASSUMED, Origin.DRIVER}
    assert machine.origins["gpu.memory_bytes"] == machine.origins["cpu.ram_bytes"] == Origin.DRIVER
    assert machine.origins["gpu.flops"] == machine.origins["link.h2d"] == Origin.ASSUMED


def test_what_was_measured_stands() -> None:
    machine = machine_profile(PROBE, measured())
    assert (machine.gpu.flops, machine.gpu.bytes_per_s) == (40e12, 240e9)
    assert machine.link.h2d == pytest.approx(12e9)
    assert machine.link.d2h == pytest.approx(11e9)
    assert machine.link.h2d_pageable == pytest.approx(6e9)
    assert machine.link.latency_s == pytest.approx(1e-5)
    assert (machine.cpu.flops, machine.cpu.ram_bytes_per_s, machine.disk_bytes_per_s) == (0.9e12, 50e9, 3.4e9)
    assert machine.cpu.weights_bytes_per_s == {8: pytest.approx(44e9)}
    assert machine_profile(PROBE, measured(), precision="int4").cpu.weights_bytes_per_s == {8: pytest.approx(30e9)}
    told = {name for name, origin in machine.origins.items() if origin is not Origin.MEASURED}
    assert told == {"gpu.memory_bytes", "cpu.cores", "cpu.ram_bytes"}


def test_an_emulated_device_is_the_machines_card() -> None:
    machine = machine_profile(replace(PROBE, gpus=()), measured("emulated:slow-link"))
    assert (machine.gpu.name, machine.gpu.memory_bytes) == ("emulated:slow-link", 4 * GIB)


@pytest.mark.parametrize("gpu", [replace(RTX, total_bytes=None), replace(RTX, is_integrated=True)])
def test_a_card_that_cannot_be_planned_with_is_none(gpu: GpuInfo) -> None:
    machine = machine_profile(replace(PROBE, gpus=(gpu,)))
    assert machine.gpu is None
    assert "gpu.flops" not in machine.origins


@pytest.mark.parametrize(
    ("told", "listed"),
    [
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "NVIDIA GeForce RTX 4060 Laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada"),
        ("Tesla T4", "NVIDIA T4"),
        ("AMD Radeon RX 7900 XTX", "Radeon RX 7900 XTX"),
        ("NVIDIA GeForce RTX 3060 12GB", "NVIDIA GeForce RTX 3060"),
    ],
)
def test_one_card_has_one_key(told: str, listed: str) -> None:
    assert card_key(told) == card_key(listed)
    assert card_key(told) in known_cards()


def test_cards_of_other_kinds_have_other_keys() -> None:
    names = ("RTX 4070", "RTX 4070 Ti", "RTX 4070 SUPER", "RTX 4070 Ti SUPER", "RTX 4070 Laptop GPU")
    assert len({card_key(f"NVIDIA GeForce {name}") for name in names}) == len(names)
    # The Quadro RTX 6000 (Turing) and the RTX 6000 Ada are two cards.
    assert card_key("Quadro RTX 6000") != card_key("NVIDIA RTX 6000 Ada Generation")


def test_an_unknown_card_goes_by_what_its_driver_tells() -> None:
    gpu = replace(RTX, name="NVIDIA GeForce RTX 9090", memory_bytes_per_s=1.5e12, shader_flops=1e14)
    card, origins = assumed_card(gpu)
    assert (card.flops, card.bytes_per_s) == (2e14, 1.5e12)
    assert origins == {"flops": Origin.ASSUMED, "bytes_per_s": Origin.DRIVER}
    dark, _ = assumed_card(GpuInfo("?", 8 * GIB, None, None, None, None, vendor=Vendor.AMD))
    assert 1e11 < dark.bytes_per_s < 1e12
    assert dark.flops > 1e12
    assert assumed_link(None).h2d > assumed_link(RTX).h2d


def test_what_is_saved_is_read_again() -> None:
    save_measurements(measured())
    assert load_measurements(PROBE, "cuda:0") == measured()
    assert load_measurements(PROBE, "cpu") is None
    later = replace(measured(), kind="thorough")
    save_measurements(later)
    assert load_measurements(PROBE, "cuda:0") == later


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda probe: replace(probe, gpus=(replace(RTX, driver="590.1"),)), ("driver", "580.65", "590.1")),
        (lambda probe: replace(probe, ram_bytes=64 * GIB), ("RAM", "32 GiB", "64 GiB")),
        (lambda probe: replace(probe, gpus=()), ("graphics card",)),
        (lambda probe: replace(probe, gpus=(replace(RTX, pcie_width_now=4),)), ("PCIe 4 x4",)),
        (lambda probe: replace(probe, models_disk=None), ("disk", "WD 850, nvme", "unknown")),
    ],
)
def test_a_changed_machine_is_noticed(change: Callable[[Probe], Probe], facts: tuple[str, ...]) -> None:
    assert changes(PROBE, "cuda:0") == ()
    save_measurements(measured())
    assert changes(PROBE, "cuda:0") == ()
    other = change(PROBE)
    assert load_measurements(other, "cuda:0") is None
    said = " ".join(changes(other, "cuda:0"))
    assert all(fact in said for fact in facts)
    assert changes(other, "emulated:slow-link") == ()


def test_what_changes_by_the_minute_is_no_change() -> None:
    save_measurements(measured())
    busy = replace(RTX, free_bytes=GIB, used_by_others_bytes=6 * GIB, pcie_generation_now=4)
    now = replace(PROBE, gpus=(busy,), ram_available_bytes=GIB, models_disk_free_bytes=1)
    assert load_measurements(now, "cuda:0") is not None


def test_a_write_that_fails_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_measurements(measured())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_measurements(replace(measured(), kind="thorough"))
    assert load_measurements(PROBE, "cuda:0") == measured()
    assert list(path.parent.iterdir()) == [path]


_NONSENSE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


def _places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, inner in items for place in _places(inner, (*here, key)))]


@given(data=st.data(), nonsense=_NONSENSE)
def test_a_file_with_nonsense_is_none_or_can_be_planned_with(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, nonsense: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "nonsense.json"
    saved = json.loads(json.dumps({"version": 1, **_as_json(measured())}))
    *way, last = data.draw(st.sampled_from([place for place in _places(saved) if place]))
    inner = saved
    for key in way:
        inner = inner[key]
    inner[last] = nonsense
    path.write_text(json.dumps(saved))
    found = read_measurements(path)
    if found is not None:
        machine = machine_profile(PROBE, found)
        assert machine.link.h2d > 0
        assert machine.disk_bytes_per_s > 0


def _as_json(measurements: Measurements) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(measurements)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"version": 2}', "[" * 100_000])
def test_what_is_no_file_of_ours(tmp_path: Path, text: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text)
    assert read_measurements(path) is None
    assert read_measurements(tmp_path) is None


@pytest.mark.parametrize(
    ("nbytes", "rate"), [(10**5, 10e9), (10**6, 10e9), (10**7, 15e9), (10**8, 20e9), (10**9, 20e9), (None, 20e9)]
)
def test_bigger_experts_are_read_as_fast_as_experts_of_their_size(nbytes: int | None, rate: float) -> None:
    sizes = ((10**6, 10e9), (10**8, 20e9), (10**6, 9e9))
    times = tuple(ExpertTime("cpu", 64, 64, "bf16", 1, 8, size, size / speed) for size, speed in sizes)
    found = replace(measured(), experts=times)
    assert found.weights_bytes_per_s("bf16", nbytes) == {8: pytest.approx(rate)}
    machine = machine_profile(PROBE, found, precision="bf16", expert_bytes=nbytes)
    assert machine.cpu.weights_bytes_per_s == {8: pytest.approx(rate)}


def test_ceilings_are_the_best_that_was_measured_or_what_an_emulated_card_says(switchyard_home: Path) -> None:
    assert measured_ceilings(PROBE, "cuda:0") == {}
    save_measurements(measured())
    found = measured_ceilings(PROBE, "cuda:0")
    assert found == {"h2d": pytest.approx(12e9), "d2h": pytest.approx(11e9), "disk": 3.4e9}
    save_measurements(measured(""))
    said = measured_ceilings(PROBE, "emulated:slow-linkx3#0")
    assert (said["h2d"], said["d2h"], said["disk"]) == (2e9, 2e9, 3.4e9)
    assert measured_ceilings(PROBE, "emulated:nothing").keys() == {"h2d", "d2h", "disk"}
