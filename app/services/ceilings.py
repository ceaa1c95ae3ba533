"""Measured limits of copies and reads: what the dashed lines of the timeline stand for."""

from __future__ import annotations

import json

from engine.common.model_info import ModelInfo
from engine.common.paths import resources_dir
from engine.hardware.measurement_files import load_measurements
from engine.hardware.probe import probe

_EMULATED = "emulated:"


def measured_ceilings(model: ModelInfo) -> dict[str, float]:
    """Bytes per second by lane (`h2d`, `d2h`, `disk`), as far as they were measured.

    An emulated card's link is what its profile says.  Looks at the machine, so not on the thread of a window.
    """
    found: dict[str, float] = {}
    device = model.device
    if device.startswith(_EMULATED):
        name = device.removeprefix(_EMULATED).partition("#")[0].partition("x2")[0]
        try:
            profile = json.loads((resources_dir() / "hardware" / f"{name}.json").read_text(encoding="utf-8"))
            found["h2d"] = float(profile["link_h2d_gbps"]) * 1e9
            found["d2h"] = float(profile["link_d2h_gbps"]) * 1e9
        except (OSError, ValueError, KeyError, TypeError):
            pass
    machine = probe()
    measurements = load_measurements(machine, "" if device == "cpu" or device.startswith(_EMULATED) else device)
    if measurements is None:
        return found
    for lane in ("h2d", "d2h"):
        line = measurements.link(lane, pinned=True) or measurements.link(lane, pinned=False)
        if line is not None and lane not in found:
            found[lane] = line[1]
    if measurements.disk:
        found["disk"] = max(read.bytes_per_s for read in measurements.disk)
    return found
