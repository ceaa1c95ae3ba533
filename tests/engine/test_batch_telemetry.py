"""Timelines of batches: the same promises as those of chats, whatever the order of the work."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.hardware.profiles import DeviceProfile, lent
from engine.planner.schedules import CGOPIPE, SCHEDULES, Schedule
from engine.runtime.batch.policy import BatchPolicy
from engine.telemetry.analysis import waiting
from engine.telemetry.lanes import BATCH_STEP, CPU_ATTENTION, CPU_EXPERTS, D2H, H2D, PHASE, SMALL_COPY, SWEEPS
from engine.telemetry.records import Records
from engine.telemetry.trace_export import trace_events
from tests.combinations import some
from tests.engine.on_devices import opened
from tests.engine.recorded_runs import of_lane, recorded_batch, total
from tests.engine.tiny_families import tiny_checkpoint
from tests.unit.trace_format import check_trace

LENGTHS = [1, 40, 90, 12, 33, 7]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tiny_checkpoint("mixtral", tmp_path_factory.mktemp("batch-telemetry"), num_hidden_layers=3)
    gc.collect()


def policy(schedule: Schedule | None, rows: int = 2) -> BatchPolicy:
    return BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=120, micro_batch_rows=rows, schedule=schedule)


def check_steps(spans: Records, steps: Records) -> None:
    """Sweeps follow each other without gaps, and all that they took is accounted for."""
    sweeps = steps[steps["name"] == BATCH_STEP]
    assert len(sweeps) > 1
    assert (sweeps["start_ns"][1:] == sweeps["end_ns"][:-1]).all()
    assert total(sweeps, "tokens") == sum(LENGTHS) + 3 * len(LENGTHS)
    for sweep in sweeps.reshape(-1, 1):
        waited = waiting(spans, sweep)
        assert waited.seconds == pytest.approx(int(sweep["end_ns"][0] - sweep["start_ns"][0]) / 1e9, rel=0.02)
    assert {int(number) for number in spans["step"]} <= {-1, *steps["step"].tolist()}
    assert {int(number) for number in spans["request"]} <= {0, int(sweeps["request"][0])}
    assert len(of_lane(spans, PHASE)) == len(steps)
    check_trace({"displayTimeUnit": "ms", "traceEvents": list(trace_events(spans, steps))})


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("schedule", some([None, *SCHEDULES.values()], every=4), ids=str)
def test_bytes_are_the_links_and_no_engine_copies_twice_at_once(checkpoint: Path, schedule: Schedule | None) -> None:
    with opened(checkpoint, cache_slots=3) as model:
        collection, heard = recorded_batch(model, LENGTHS, policy(schedule))
    spans, steps = collection.spans, collection.steps
    told = Counter({"h2d": 0, "d2h": 0})
    for copy in heard:
        told[copy.direction] += copy.nbytes
    assert told["h2d"]
    assert total(steps, "h2d_bytes") == told["h2d"]
    assert total(steps, "d2h_bytes") == told["d2h"]
    copies = spans[np.isin(spans["lane"], (H2D, D2H, SMALL_COPY))]
    assert int(copies["nbytes"].sum()) == told["h2d"] + told["d2h"]
    assert len(copies) == len(heard)
    weights = of_lane(spans, H2D)
    assert (weights["start_ns"][1:] >= weights["end_ns"][:-1]).all()
    check_steps(spans, steps)


def test_copies_and_computations_overlap(checkpoint: Path) -> None:
    """By the card's clock: weights are on the link, which takes its time, while the CPU attends."""
    drip = DeviceProfile("drip", "for tests", 2**26, 0.002, 0.25, 100.0)
    with lent(drip), opened(checkpoint, cache_slots=0, device="emulated:drip") as model:
        collection, _ = recorded_batch(model, LENGTHS, policy(CGOPIPE))
    weights = of_lane(collection.spans, H2D)
    attended = of_lane(collection.spans, CPU_ATTENTION)
    assert any(
        ((weights["start_ns"] < each["end_ns"]) & (weights["end_ns"] > each["start_ns"])).any() for each in attended
    )


@pytest.mark.parametrize("rows", [1, 8])
def test_sweeps_on_the_cpu(checkpoint: Path, rows: int) -> None:
    with opened(checkpoint, 0) as model:
        collection, _ = recorded_batch(model, LENGTHS, policy(None, rows))
    check_steps(collection.spans, collection.steps)
    assert {int(lane) for lane in np.unique(collection.spans["lane"])} == {PHASE, CPU_EXPERTS, CPU_ATTENTION, SWEEPS}
    sweeps = collection.steps[collection.steps["name"] == BATCH_STEP]
    # Each token uses two experts in each of three layers, however many rows share a step.
    assert (sweeps["on_cpu"] + sweeps["prefill_on_cpu"] == 2 * 3 * sweeps["tokens"]).all()
    assert of_lane(collection.spans, SWEEPS)["count"].sum() == sweeps["tokens"].sum()
    assert not any(total(collection.steps, name) for name in ("h2d_bytes", "d2h_bytes", "disk_bytes"))
