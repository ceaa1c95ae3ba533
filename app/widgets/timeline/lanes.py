"""The lanes from top to bottom, and their data from a history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from PySide6.QtCore import QCoreApplication

from app.services.history.buckets import Floats
from app.services.history.history import History
from app.widgets.quantities import nearest_percent, number
from app.widgets.timeline.viewport import Viewport
from engine.telemetry import lanes as engine_lanes

translate = QCoreApplication.translate

_SWEEP_COLUMNS = 8
"""Columns over which the composition of sweeps is averaged."""

Kind = Literal["phase", "share", "bytes", "experts", "rate", "amount", "requests", "sweeps"]
BOTH_WAYS = ("disk_io", "pcie")
"""Lanes whose dashed line is the opposite direction, not the total that the area is part of."""
Colour = Literal["gpu", "cpu", "pcie", "disk", "muted"]


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the timeline.

    Attributes:
        key: a stable id, for tables and files.
        spans: the engine's lanes whose spans are drawn when each fits separately.
        gauges: for lanes that show sensor samples; the second is drawn as a dashed line.
        weight: its share of the height.
    """

    key: str
    title: str
    kind: Kind
    colour: Colour
    spans: tuple[int, ...] = ()
    gauges: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass
class LaneData:
    """A lane's data in a viewport.

    Attributes:
        values: stacked areas, [layers, n], in the lane's unit.
        line: a dashed line, [n], NaN where unknown; None if the lane has none.
        scale: the value at the lane's top.
        ceiling: a measured limit, dashed; None if unknown.
    """

    values: Floats
    line: Floats | None = None
    scale: float = 1.0
    ceiling: float | None = None
    names: tuple[str, ...] = field(default=())


def lanes_of(history: History, *, machine: bool) -> list[Lane]:
    """The engine's lanes for the devices its model uses, and the machine's if requested."""
    if not history.has_engine:
        return machine_lanes(history)
    found = _engine_lanes(copies=history.has_copies, requests=history.has_requests, sweeps=history.has_sweeps)
    return found + (machine_lanes(history) if machine else [])


def lane_titles() -> list[str]:
    """The names of all possible lanes, whatever this machine has."""
    return [lane.title for lane in (*_engine_lanes(copies=True, requests=True, sweeps=True), *_sensor_lanes())]


def _engine_lanes(*, copies: bool, requests: bool, sweeps: bool) -> list[Lane]:
    found = [Lane("phase", translate("Timeline", "Phase"), "phase", "muted", (engine_lanes.PHASE,))]
    if requests:
        found.append(
            Lane(
                "requests", translate("Timeline", "Requests"), "requests", "muted", (engine_lanes.REQUESTS,), weight=1.4
            )
        )
    if sweeps:
        title = translate("Timeline", "Sweeps")
        found.append(Lane("sweeps", title, "sweeps", "muted", (engine_lanes.SWEEPS,), weight=0.9))
    if copies:
        found += [
            Lane("gpu", translate("Timeline", "GPU"), "share", "gpu", (engine_lanes.GPU,)),
            Lane("h2d", translate("Timeline", "To the GPU"), "bytes", "pcie", (engine_lanes.H2D,)),
            Lane("d2h", translate("Timeline", "From the GPU"), "bytes", "pcie", (engine_lanes.D2H,), weight=0.7),
        ]
    found += [
        Lane(
            "cpu",
            translate("Timeline", "CPU"),
            "share",
            "cpu",
            (engine_lanes.CPU_EXPERTS, engine_lanes.CPU_ATTENTION),
        ),
        Lane("disk", translate("Timeline", "Disk"), "bytes", "disk", (engine_lanes.DISK,), weight=0.7),
        Lane("experts", translate("Timeline", "Experts"), "experts", "muted"),
        Lane("tokens", translate("Timeline", "Tokens/s"), "rate", "muted"),
    ]
    return found


def machine_lanes(history: History) -> list[Lane]:
    """Lanes of sensors; those that this machine lacks are left out."""
    return [lane for lane in _sensor_lanes() if any(map(history.knows_gauge, lane.gauges))]


def _sensor_lanes() -> list[Lane]:
    def lane(key: str, title: str, kind: Kind, colour: Colour, *gauges: str) -> Lane:
        return Lane(key, title, kind, colour, gauges=gauges or (key,), weight=0.9)

    return [
        lane("gpu_busy", translate("Timeline", "GPU busy"), "share", "gpu"),
        lane("cpu_all", translate("Timeline", "CPU busy"), "share", "cpu", "cpu_ours", "cpu_all"),
        lane("ram", translate("Timeline", "RAM"), "amount", "cpu", "ram_ours", "ram_used"),
        lane("vram", translate("Timeline", "VRAM"), "amount", "gpu", "vram_ours", "vram_used"),
        lane("pcie", translate("Timeline", "PCIe"), "amount", "pcie", "pcie_rx", "pcie_tx"),
        lane("faults", translate("Timeline", "Page faults"), "amount", "muted", "minor_faults"),
        lane("disk_io", translate("Timeline", "Disk I/O"), "amount", "disk", "disk_read", "disk_write"),
        lane("gpu_power", translate("Timeline", "GPU power"), "amount", "gpu"),
        lane("cpu_power", translate("Timeline", "CPU power"), "amount", "cpu"),
        lane("gpu_clock", translate("Timeline", "GPU clock"), "amount", "gpu"),
        lane("cpu_clock", translate("Timeline", "CPU clock"), "amount", "cpu"),
        lane("gpu_temperature", translate("Timeline", "GPU heat"), "amount", "gpu"),
        lane("cpu_temperature", translate("Timeline", "CPU heat"), "amount", "cpu"),
    ]


def read_lane(lane: Lane, history: History, viewport: Viewport, ceilings: dict[str, float]) -> LaneData:
    """A lane's data, column by column."""
    edges = viewport.edges()
    if lane.gauges:
        return _gauge_data(lane, history, edges)
    if lane.kind == "share":
        names: tuple[str, ...] = (translate("Timeline", "experts"), translate("Timeline", "attention"))
        values = np.stack([history.busy(number_of, edges) for number_of in lane.spans])
        return LaneData(
            values,
            scale=max(1.0, float(values.sum(axis=0).max(initial=0.0))),
            names=names if len(values) == len(names) else (),
        )
    if lane.kind == "bytes":
        rates = history.bytes_per_s(lane.spans[0], edges)
        ceiling = ceilings.get(lane.key)
        top = max(float(rates.max(initial=0.0)), 1e6)
        # On its own scale, an almost idle lane would look busy.
        return LaneData(rates[None], scale=nice(max(top, 1.08 * ceiling if ceiling else 1e8)), ceiling=ceiling)
    if lane.kind == "experts":
        names = (translate("Timeline", "hit"), translate("Timeline", "fetched"), translate("Timeline", "CPU"))
        return LaneData(history.experts(edges), names=names)
    if lane.kind == "requests":
        names = (
            translate("Timeline", "writing"),
            translate("Timeline", "reading"),
            translate("Timeline", "waiting"),
            translate("Timeline", "in the background"),
        )
        counts = history.requests(edges)
        return LaneData(counts, scale=nice(max(1.0, float(counts.sum(axis=0).max(initial=0.0)))), names=names)
    if lane.kind == "sweeps":
        names = (translate("Timeline", "written"), translate("Timeline", "read"), translate("Timeline", "of jobs"))
        # Requests and jobs take turns in a fraction of a second: what counts is how much of each went through.
        places = np.unique(np.append(np.arange(0, len(edges) - 1, _SWEEP_COLUMNS), len(edges) - 1))
        taken = np.repeat(history.swept_per_s(edges[places]), np.diff(places), axis=1)
        return LaneData(taken, scale=nice(1.1 * max(1.0, float(taken.sum(axis=0).max(initial=0.0)))), names=names)
    if lane.kind == "rate":
        rates = history.tokens_per_s(edges)
        known = rates[np.isfinite(rates)]
        # The highest column is often one short step: it may touch the top.
        top = float(np.percentile(known, 98)) if len(known) else 1.0
        return LaneData(np.zeros((0, len(rates))), line=rates, scale=nice(1.15 * max(top, 1.0)))
    return LaneData(np.zeros((0, len(edges) - 1)))


def _gauge_data(lane: Lane, history: History, edges: Floats) -> LaneData:
    rows = [history.gauge(name, edges) for name in lane.gauges]
    highest = max((float(np.nanmax(row)) for row in rows if np.isfinite(row).any()), default=0.0)
    scale = 1.0 if lane.kind == "share" else nice(1.1 * max(highest, 1.0))
    return LaneData(rows[0][None], line=rows[1] if len(rows) > 1 else None, scale=scale)


def nice(value: float) -> float:
    """The next of 1, 1.5, 2, 3, 4, 5, 6, 8, 10 of a decade, so that the scale does not jitter."""
    decade = 10.0 ** np.floor(np.log10(max(value, 1e-9)))
    for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10):
        if value <= step * decade * 1.0001:
            return float(step * decade)
    return float(10 * decade)


def amount_text(lane: Lane, value: float) -> str:
    """A value of this lane with its unit."""
    if not np.isfinite(value):
        return "–"
    if lane.kind in ("share", "experts"):
        return nearest_percent(value)
    if lane.kind in ("rate", "requests"):
        return number(value, 1)
    if lane.kind == "sweeps":
        return f"{number(value, 0)}/s"
    if lane.key.endswith("_power"):
        return f"{number(value, 0)} W"
    if lane.key.endswith("_clock"):
        return f"{number(value / 1e9, 2)} GHz"
    if lane.key.endswith("_temperature"):
        return f"{number(value, 0)} °C"
    if lane.key == "faults":
        return f"{number(value, 0)}/s"
    if lane.key in ("ram", "vram"):
        return translate("Fit", "{0} GB").format(number(value / 2**30, 1))
    if value >= 1e7 or value == 0:
        return translate("Fit", "{0} GB/s").format(number(value / 1e9, 2))
    return translate("Fit", "{0} MB/s").format(number(value / 1e6, 2))


def _both_ways(into: float, out: float) -> str:
    """`↓ 12.4 ↑ 0.2 GB/s`."""
    most = max((value for value in (into, out) if np.isfinite(value)), default=0.0)
    unit = 1e9 if most >= 1e9 else 1e6
    down, up = (number(value / unit, 1) if np.isfinite(value) else "–" for value in (into, out))
    both = translate("Fit", "{0} GB/s") if most >= 1e9 else translate("Fit", "{0} MB/s")
    return both.format(f"↓ {down} ↑ {up}")


def reading(lane: Lane, data: LaneData, column: int) -> str:
    """A lane's value at a column, as short text; empty if there is none."""
    columns = data.values.shape[1] if data.values.size else (len(data.line) if data.line is not None else 0)
    if not 0 <= column < columns:
        return ""
    if lane.kind == "experts":
        shares = zip(data.names, data.values[:, column].tolist(), strict=True)
        return ", ".join(f"{name} {nearest_percent(share)}" for name, share in shares if share > 0.004)
    if lane.kind == "requests":
        counts = zip(data.names, data.values[:, column].tolist(), strict=True)
        return ", ".join(f"{number(count, 0 if count >= 1 else 1)} {name}" for name, count in counts if count > 0.04)
    if lane.kind == "sweeps":
        taken = zip(data.names, data.values[:, column].tolist(), strict=True)
        return ", ".join(f"{number(rate, 0)}/s {name}" for name, rate in taken if rate >= 0.5)
    if lane.kind == "rate":
        return amount_text(lane, float(data.line[column])) if data.line is not None else ""
    own = amount_text(lane, float(data.values[:, column].sum()))
    if own == "–":
        return own
    if lane.key in BOTH_WAYS and data.line is not None:
        return _both_ways(float(data.values[:, column].sum()), float(data.line[column]))
    if lane.gauges and data.line is not None and np.isfinite(data.line[column]):
        return translate("Timeline", "{0} of {1}").format(own, amount_text(lane, float(data.line[column])))
    return own
