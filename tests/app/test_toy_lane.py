"""A lane is one entry, and whatever records into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import io, json, sys, time
from engine.common import lanes as data

toy = data.Track("toy", "playing with the toy", "toy", per_device=False, moves=True)
lane = data.Lane("toy", "Toy", "What the toy does. It squeaks.", "bytes", "disk", "B/s", (toy,), needs="spans")
data.LANES = (*data.LANES, lane)
heat = data.Lane("heat", "Heat", "How hot it is.", "amount", unit="°C", gauges=("heat",))
data.SENSOR_LANES = (*data.SENSOR_LANES, heat)
data.TRACKS = tuple(sorted((t for each in data.LANES for t in each.tracks), key=lambda t: not t.is_work))
data.WORK = tuple(t.name for t in data.TRACKS if t.is_work)

from app.services.history.history import History  # what is made of the entries comes after them
from app.widgets.timeline.lanes import lane_help, lanes_of, read_lane, reading, track_name
from app.widgets.timeline.navigator import Viewport
from engine.planner.simulator.sweeps import Timeline
from engine.telemetry import lanes
from engine.telemetry.analysis import range_averages
from engine.telemetry.recorder import Recorder
from engine.telemetry.trace_export import trace_events, write_spans

recorder, number = Recorder(), data.track_number("toy")
recorder.start()
begin = time.perf_counter_ns()
recorder.span(number, lanes.COPY, begin, begin + 10**9, nbytes=5 * 10**8)
spans, steps = recorder.take_spans(), recorder.take_steps()
table, history = io.StringIO(), History()
write_spans(spans, table)
history.add_spans(spans)
history.add_gauges(begin, {"heat": 41.0})
shown = {each.key: each for each in lanes_of(history, machine=True)}
viewport = Viewport(begin, 10**9, 100)
json.dump(
    {
        "tracks": [event["args"]["name"] for event in trace_events(spans, steps) if event["name"] == "thread_name"],
        "table": table.getvalue(),
        "averages": range_averages(spans, steps, begin, begin + 10**9).gigabytes_per_s,
        "help": lane_help(shown["toy"]),
        "reading": reading(shown["toy"], read_lane(shown["toy"], history, viewport, {}), 50),
        "sensor": reading(shown["heat"], read_lane(shown["heat"], history, viewport, {}), 50),
        "words": track_name("toy"),
        "simulated": Timeline().busy_s("toy") == 0,
    },
    sys.stdout,
)
"""


def test_a_lane_is_recorded_analysed_exported_and_shown_by_its_entry() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "toy" in found["tracks"]
    assert "\ntoy,0,copy," in found["table"]
    assert found["averages"] == {"toy": 0.5}
    assert found["help"] == "What the toy does. It squeaks."
    assert found["reading"] == "0.50 GB/s"
    assert found["sensor"] == "41 °C"
    assert found["words"] == "toy"
    assert found["simulated"]
