"""Timelines of a real card: dense work, graphs and heads are seen by the card's clock."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.telemetry.lanes import DECODE, DENSE, GPU, GRAPH, HEAD
from engine.telemetry.trace_export import trace_events
from tests.engine.on_devices import MIB, opened, reference
from tests.engine.recorded_runs import of_lane, recorded_chat
from tests.unit.trace_format import check_trace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CLOCKS_NS = 200_000
"""By which the card's clock and the host's may differ for a moment."""


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("config", [{"cache_slots": 4}, {"cache_slots": 4, "misses": "layer"}, {}], ids=str)
def test_every_step_has_dense_work_on_the_card(config: dict[str, Any], graphs: str, tmp_path: Path) -> None:
    folder = reference("qwen3_moe", tmp_path).folder
    with opened(folder, device="cuda:0", vram_bytes=512 * MIB, graphs=graphs, **config) as model:
        collection, _ = recorded_chat(model)
    reference.cache_clear()
    busy = of_lane(collection.spans, GPU)
    for step in collection.steps[collection.steps["name"] == DECODE][:-1]:
        mine = busy[busy["step"] == step["step"]]
        assert np.isin(mine["name"], (DENSE, GRAPH)).any()
        assert np.isin(mine["name"], (HEAD, GRAPH)).any()
        wall_ns = int(step["end_ns"] - step["start_ns"])
        assert int((mine["end_ns"] - mine["start_ns"]).sum()) <= wall_ns + CLOCKS_NS
    check_trace({"displayTimeUnit": "ms", "traceEvents": list(trace_events(collection.spans, collection.steps))})
