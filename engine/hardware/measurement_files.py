"""Measurements on disk: one JSON file per machine, driver and device, in the data folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.paths import data_dir
from engine.hardware.measured import Arithmetic, CopyTime, DiskRead, ExpertTime, Measurements, RamRead
from engine.hardware.probe import HardwareProfile as Probe
from engine.hardware.profiles import EMULATED, emulated_cards, read_profile

_VERSION = 1
_ROWS: dict[str, type] = {
    "ram": RamRead,
    "experts": ExpertTime,
    "copies": CopyTime,
    "disk": DiskRead,
    "arithmetic": Arithmetic,
}
Row = TypeVar("Row")


def described(probe: Probe) -> dict[str, str]:
    """What measurements depend on, in words: if any of it changes, they are outdated.

    Memory used by others, free space and the like are left out: they change by the minute.
    """
    gpu = probe.compute_gpu
    disk = probe.models_disk
    return {
        "system": f"{probe.os}, {probe.architecture}",
        "processor": f"{probe.cpu}, {probe.physical_cores} cores, {probe.usable_cpus} usable",
        # Rounded to half a GiB: the kernel's own share differs between its versions.
        "RAM": f"{round(probe.ram_bytes / 2**29) / 2:g} GiB",
        "graphics card": "none" if gpu is None else f"{gpu.name}, {(gpu.total_bytes or 0) / 2**30:.1f} GiB",
        "driver": (gpu.driver if gpu else None) or "none",
        "slot": "none" if gpu is None else f"PCIe {gpu.pcie_generation or '?'} x{_lanes(gpu) or '?'}",
        "disk": "unknown" if disk is None else f"{disk.model or disk.device or disk.file_system}, {disk.kind}",
    }


def measurements_file(machine: Mapping[str, str], device: str) -> Path:
    """The file with the measurements of a machine with a device."""
    mark = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:12]
    return _folder() / f"{re.sub('[^A-Za-z0-9_.-]', '-', device) or 'cpu'}-{mark}.json"


def save_measurements(measurements: Measurements) -> Path:
    """Saves them, replacing earlier ones of the same machine and device.

    Raises:
        OSError: they could not be written; the old file is unchanged.
    """
    path = measurements_file(measurements.machine, measurements.device)
    write_private(path, json.dumps({"version": _VERSION, **asdict(measurements)}, indent=1))
    return path


def load_measurements(probe: Probe, device: str = "") -> Measurements | None:
    """This machine's measurements with this device; None if there are none, or they are unreadable.

    Args:
        device: `cuda:0`, `emulated:NAME`; empty or `cpu` for the CPU alone.
    """
    return read_measurements(measurements_file(described(probe), "" if device == "cpu" else device))


def measured_ceilings(probe: Probe, device: str) -> dict[str, float]:
    """Fastest copies and reads that were measured, in bytes per second by lane (`h2d`, `d2h`, `disk`).

    Args:
        device: that a model runs on; the link of an emulated one is what its profile says.
    """
    found: dict[str, float] = {}
    is_emulated = device.startswith(EMULATED)
    if is_emulated:
        with contextlib.suppress(EngineError):
            profile = read_profile(emulated_cards(device)[0])
            found |= {"h2d": profile.link_h2d_gbps * 1e9, "d2h": profile.link_d2h_gbps * 1e9}
    measurements = load_measurements(probe, "" if is_emulated else device)
    if measurements is None:
        return found
    for lane in ("h2d", "d2h"):
        line = measurements.link(lane, pinned=True) or measurements.link(lane, pinned=False)
        if line is not None:
            found.setdefault(lane, line[1])
    if measurements.disk:
        found["disk"] = max(read.bytes_per_s for read in measurements.disk)
    return found


def changes(probe: Probe, device: str = "") -> tuple[str, ...]:
    """What has changed since this device was last measured, in sentences; empty if nothing has."""
    if load_measurements(probe, device) is not None:
        return ()
    # By their own timestamps: copying a folder changes file dates.
    earlier = max(_all_of("" if device == "cpu" else device), key=lambda one: one.taken_at, default=None)
    if earlier is None:
        return ()
    now = described(probe)
    return tuple(
        f"The {name} was {was} and is now {now[name]}."
        for name, was in earlier.machine.items()
        if name in now and now[name] != was
    )


def read_measurements(path: Path) -> Measurements | None:
    """The measurements in a file; None if there is none, or it is not one of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != _VERSION:
            return None
        for name, kind in _ROWS.items():
            content[name] = tuple(_row(kind, row) for row in content[name])
        content["notes"] = tuple(str(note) for note in content["notes"])
        content["others"] = float(content.get("others", 0.0))
        limit = content["pinned_limit_bytes"]
        whole = [content["device_bytes"], 0 if limit is None else limit]
        texts = [content[name] for name in ("kind", "device", "taken_at")]
        tables = [content[name] for name in ("machine", "skipped", "unsteady")]
        sound = all(type(number) is int and number >= 0 for number in whole)
        if not (sound and all(type(text) is str for text in texts) and all(type(table) is dict for table in tables)):
            return None
        measurements = Measurements(**content)
    except (OSError, ValueError, ArithmeticError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return measurements


def _row(kind: type[Row], content: Mapping[str, Any]) -> Row:
    """Raises: ValueError, TypeError: wrong fields, or an impossible number."""
    for entry in fields(kind):  # type: ignore[arg-type]  # rows are dataclasses
        value = content[entry.name]
        if entry.type in ("int", "float"):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (entry.name == "seconds" and value == 0):
                raise ValueError(entry.name)
        elif not isinstance(value, bool if entry.type == "bool" else str):
            raise ValueError(entry.name)
    return kind(**content)


def _all_of(device: str) -> list[Measurements]:
    found = (read_measurements(path) for path in _folder().glob("*.json"))
    return [one for one in found if one is not None and one.device == device]


def _lanes(gpu: Any) -> int | None:
    known = [lanes for lanes in (gpu.pcie_width, gpu.pcie_width_now) if lanes]
    return min(known, default=None)


def _folder() -> Path:
    return data_dir() / "measurements"
