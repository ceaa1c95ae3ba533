"""Models of true size, in files with holes: what PCs with little memory plan for them, and what loading takes there."""

import gc
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.checkpoint.catalogue import find_shape
from engine.common.config import EngineConfig
from engine.formats import STORED
from engine.hardware.machine import read_machine
from engine.kernels.native.library import usable_isas
from engine.planner.plan import Limits, make_plan
from engine.runtime.load import model as loading
from engine.runtime.load.plan import Plan
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import library_tokens, opened_model, random_prompt
from tests.engine.true_shapes import qwen3_235b, qwen4exp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files with holes")
GIB = 2**30
OTHERS = Limits(ram_of_others=3 * GIB, vram_of_others=GIB // 2)
"""What a desktop takes."""


def test_235_billion_numbers_are_planned_wholly_in_memory(tmp_path: Path) -> None:
    machine = read_machine("desktop-rtx-4070-12gb").with_memory(vram_bytes=12 * GIB, ram_bytes=64 * GIB)
    shape = find_shape(str(qwen3_235b(tmp_path)))
    assert shape.total_weights == pytest.approx(235e9, rel=0.01)
    plan = make_plan(machine, shape, limits=OTHERS)
    assert (plan.precision, plan.disk_bytes, plan.streamed_bytes, plan.written_bytes) == (STORED, 0, 0, 0)
    assert plan.card.held <= 12 * GIB
    assert 58e9 < plan.ram.experts < 61e9
    assert plan.ram.held <= 64 * GIB
    assert plan.speed.decode_tokens_per_s > 1


@pytest.mark.exhaustive
def test_a_table_of_51_billion_is_planned_on_a_small_pc(tmp_path: Path) -> None:
    machine = read_machine("laptop-rtx-4060-8gb").with_memory(vram_bytes=8 * GIB, ram_bytes=32 * GIB)
    shape = find_shape(str(qwen4exp(tmp_path)))
    assert shape.total_weights == pytest.approx(119e9, rel=0.05)
    assert (shape.table_rows, shape.table_columns) == (16, 160)
    plan = make_plan(machine, shape, limits=OTHERS)
    assert plan.card is not None
    assert plan.table_bytes > 28e9
    assert plan.ram.held <= 32 * GIB
    assert not plan.streamed_bytes


@pytest.mark.exhaustive
@pytest.mark.skipif(not usable_isas(), reason="no native kernels here")
def test_it_takes_the_memory_that_was_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, build = list[Plan](), loading.build

    def told(plan: Plan, *arguments: Any, **options: Any) -> LoadedModel:
        found.append(plan)
        return build(plan, *arguments, **options)

    monkeypatch.setattr(loading, "build", told)
    path = qwen4exp(tmp_path)
    config = EngineConfig(str(path), device="cpu", ram_bytes=4 * GIB, threads=2, context_tokens=512)
    gc.collect()
    before = psutil.Process().memory_info().rss
    with opened_model(config) as loaded:
        placed = found[-1].placement
        assert placed.on_disk > 30e9
        assert found[-1].tables
        assert not placed.streamed.layers
        assert loaded.disk_backed is not None
        assert loaded.tables is not None
        library_tokens(loaded.model, random_prompt(24), 8)
        assert loaded.tables.nbytes <= 2 * (24 + 8) * found[-1].placement.tables.row_bytes
        resident = psutil.Process().memory_info().rss - before
        filled = loaded.disk_backed.filled_nbytes
        assert resident <= 1.1 * (placed.ram.dense + filled) + GIB // 4  # modules, a tokenizer, activations
        assert filled <= placed.ram.slots
        assert resident <= 1.1 * placed.ram.held
