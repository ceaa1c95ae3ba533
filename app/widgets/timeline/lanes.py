"""The lanes from top to bottom, and their data from a history."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from PySide6.QtCore import QCoreApplication

from app.services.history.gauges import Floats
from app.services.history.history import History
from app.widgets.quantities import nearest_percent, number
from app.widgets.timeline.navigator import Viewport
from engine.common.lanes import LANES, SENSOR_LANES, TRACKS, Lane, track_number
from engine.telemetry.analysis import OTHER

translate = QCoreApplication.translate

_SWEEP_COLUMNS = 8
"""Columns over which the composition of sweeps is averaged."""


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


def lane_words(text: str) -> str:
    return translate("Lane", text) if text else ""


def lane_help(lane: Lane) -> str:
    if lane in LANES or lane.help.count(". "):
        return lane_words(lane.help)
    source = translate("Timeline", "This comes from a sensor or driver, not from the engine.")
    return f"{lane_words(lane.help)} {source}"


def doing_words(track: str) -> str:
    """What is done in a track, in words that follow "61%"."""
    if track == OTHER:
        return translate("Timeline", "sampling and bookkeeping")
    return next((lane_words(each.words) for each in TRACKS if each.name == track), track)


def track_name(track: str) -> str:
    return next((lane_words(each.short) for each in TRACKS if each.name == track), track)


def tracks_of(lane: Lane) -> tuple[int, ...]:
    return tuple(track_number(track.name) for track in lane.tracks)


def lanes_of(history: History, *, machine: bool) -> list[Lane]:
    if not history.has_engine:
        return machine_lanes(history)

    def is_there(lane: Lane) -> bool:
        if lane.needs == "spans":
            return any(map(history.devices, tracks_of(lane)))
        return {"": True, "copies": history.has_copies, "experts": history.has_experts}[lane.needs]

    found = list(filter(is_there, LANES))
    return found + (machine_lanes(history) if machine else [])


def lane_titles() -> list[str]:
    return [lane_words(lane.title) for lane in (*LANES, *SENSOR_LANES)]


def machine_lanes(history: History) -> list[Lane]:
    return [lane for lane in SENSOR_LANES if any(map(history.knows_gauge, lane.gauges))]


def read_lane(lane: Lane, history: History, viewport: Viewport, ceilings: dict[str, float]) -> LaneData:
    edges = viewport.edges()
    if lane.gauges:
        return _gauge_data(lane, history, edges)
    if lane.kind == "share":
        names: tuple[str, ...] = (translate("Timeline", "experts"), translate("Timeline", "attention"))
        values = np.stack([history.busy(number_of, edges) for number_of in tracks_of(lane)])
        return LaneData(
            values,
            scale=max(1.0, float(values.sum(axis=0).max(initial=0.0))),
            names=names if len(values) == len(names) else (),
        )
    if lane.kind == "bytes":
        rates = history.bytes_per_s(tracks_of(lane)[0], edges)
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
    if not np.isfinite(value):
        return "–"
    match lane.unit:
        case "%":
            return nearest_percent(value)
        case "":
            return number(value, 1)
        case "/s":
            return f"{number(value, 0)}/s"
        case "GHz":
            return f"{number(value / 1e9, 2)} GHz"
        case "GB":
            return translate("Fit", "{0} GB").format(number(value / 2**30, 1))
        case "B/s" if value >= 1e7 or value == 0:
            return translate("Fit", "{0} GB/s").format(number(value / 1e9, 2))
        case "B/s":
            return translate("Fit", "{0} MB/s").format(number(value / 1e6, 2))
        case unit:
            return f"{number(value, 0)} {unit}"


def _both_ways(into: float, out: float) -> str:
    """`↓ 12.4 ↑ 0.2 GB/s`."""
    most = max((value for value in (into, out) if np.isfinite(value)), default=0.0)
    unit = 1e9 if most >= 1e9 else 1e6
    down, up = (number(value / unit, 1) if np.isfinite(value) else "–" for value in (into, out))
    both = translate("Fit", "{0} GB/s") if most >= 1e9 else translate("Fit", "{0} MB/s")
    return both.format(f"↓ {down} ↑ {up}")


def reading(lane: Lane, data: LaneData, column: int) -> str:
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
    if lane.both_ways and data.line is not None:
        return _both_ways(float(data.values[:, column].sum()), float(data.line[column]))
    if lane.gauges and data.line is not None and np.isfinite(data.line[column]):
        return translate("Timeline", "{0} of {1}").format(own, amount_text(lane, float(data.line[column])))
    return own
