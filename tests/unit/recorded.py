"""Random spans and steps."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from engine.planner.simulator.sweeps import LANES
from engine.telemetry.lanes import DECODE, EXPERTS, NAMES
from engine.telemetry.records import SPAN, STEP, Records

MOMENTS = st.integers(0, 10_000)


@st.composite
def spans(draw: st.DrawFn, most: int = 25) -> Records:
    """Any spans, of any lane, in no order."""
    count = draw(st.integers(0, most))
    records = np.zeros(count, SPAN)
    for record in records:
        start, length = draw(MOMENTS), draw(st.integers(0, 3000))
        record["start_ns"], record["end_ns"] = start, start + length
        record["lane"] = draw(st.integers(0, len(LANES) - 1))
        record["name"] = draw(st.integers(0, len(NAMES) - 1))
        record["device"] = draw(st.integers(0, 1))
        record["nbytes"] = draw(st.integers(0, 100))
        record["layer"], record["expert"] = draw(st.integers(-1, 5)), draw(st.integers(-1, 5))
    return records


def span(lane: int, start: int, end: int, name: int = EXPERTS, **fields: Any) -> np.void:
    """One span."""
    record = np.zeros(1, SPAN)
    for field, value in {"lane": lane, "start_ns": start, "end_ns": end, "name": name, **fields}.items():
        record[field] = value
    return record[0]


def steps(*times: tuple[int, int], name: int = DECODE, **fields: int) -> Records:
    """Steps of one token from when to when."""
    records = np.zeros(len(times), STEP)
    for number, (record, (start, end)) in enumerate(zip(records, times, strict=True)):
        record["start_ns"], record["end_ns"], record["step"] = start, end, number
    records["name"], records["tokens"], records["request"] = name, 1, 1
    for field, value in fields.items():
        records[field] = value
    return records
