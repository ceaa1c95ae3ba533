"""Models larger than memory, planned layer by layer from disk, and tables where they lie."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.model_shape import AttentionShape, ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.hardware.machine import read_machine
from engine.planner.batch_prediction import Bottleneck, JobRows, predict_on_cpu
from engine.planner.costs import engine_costs
from engine.planner.engine_memory import sizes_of
from engine.planner.placement import (
    Budgets,
    DeviceBudget,
    Experts,
    Placement,
    Sizes,
    Tables,
    Weights,
    least_ram,
    resolve,
)
from engine.planner.plan import Limits, make_plan
from engine.planner.predict import DecodePrediction, predict_decode
from engine.planner.step_time import StepTime
from engine.tuning.fit import verdict_of
from engine.verbs.plan import plan_text

GIB = 2**30
WIDE = ModelShape(
    name="70B",
    hub_id="",
    licence="",
    source="Llama 3's 70B",
    layers=80,
    dense_layers=0,
    full_attention_layers=80,
    hidden=8192,
    vocabulary=128_256,
    experts=1,  # which stands for none
    experts_per_token=1,
    expert_width=1,
    shared_width=0,
    dense_width=28_672,
    attention=AttentionShape(heads=64, kv_heads=8, head_dim=128),
    context_tokens=8192,
    parameters=70.6e9,
    other_weights=70_553_706_496,
)
IN_BLOCKS = as_quantised(WIDE, "Q4_K_M")
PC = read_machine("desktop-no-gpu-64gb")


def test_a_dense_model_of_42_gb_is_planned_on_a_pc_with_16() -> None:
    machine = PC.with_memory(ram_bytes=16 * GIB)
    plan = make_plan(machine, IN_BLOCKS)
    assert plan.disk_bytes == 0
    assert 25e9 < plan.streamed_bytes < 42e9
    assert plan.ram.held <= 16 * GIB
    tpot_s = 1 / plan.speed.decode_tokens_per_s
    assert plan.streamed_bytes / machine.disk_bytes_per_s <= tpot_s
    assert tpot_s < 1.3 * plan.streamed_bytes / machine.disk_bytes_per_s
    assert verdict_of(plan.speed.decode_tokens_per_s) == "batch-only"
    assert f"{plan.streamed_bytes / 1e9:.3g} GB of whole layers do not fit into RAM" in plan.bottleneck
    assert "GB of layers, read for each token" in plan_text(plan)


def test_all_rows_of_a_step_share_what_is_read() -> None:
    costs = replace(engine_costs(PC, IN_BLOCKS.in_place(), "stored"), streamed_bytes=30e9)
    job = JobRows(1000, 100.0, 100.0)
    alone, many = (predict_on_cpu(costs, job, rows, sweep_tokens=1024) for rows in (1, 64))
    assert alone.bottleneck is Bottleneck.DISK
    assert many.tokens_per_s > 10 * alone.tokens_per_s
    step = StepTime(costs, on_card=False).seconds(0.0)
    assert step == pytest.approx(costs.disk(30e9), rel=0.05)


def predicted(ram: int, disk: float = 1.0) -> DecodePrediction | None:
    machine = replace(PC, disk_bytes_per_s=disk * PC.disk_bytes_per_s)
    config = EngineConfig("m", device="cpu", ram_bytes=ram, context_tokens=2048)
    try:
        return predict_decode(machine, IN_BLOCKS.in_place(), config, tokens=8)
    except EngineError as error:
        assert error.code is ErrorCode.NOT_ENOUGH_MEMORY  # noqa: PT017
        return None


@settings(max_examples=5, deadline=None)
@given(st.integers(GIB, 48 * GIB), st.integers(0, 8 * GIB))
def test_more_memory_never_reads_more_nor_answers_later(ram: int, more: int) -> None:
    less, roomy = predicted(ram), predicted(ram + more)
    least = least_ram(sizes_of(engine_costs(PC, IN_BLOCKS.in_place(), "stored"), Limits(), ["stored"]))
    assert (less is not None) == (ram >= least)
    if less is None:
        return
    assert less.memory.ram.held <= ram + GIB  # with headroom and keys and values
    # Layers of a file differ in size, so that a few more may be a few bytes less.
    assert roomy.memory.streamed <= 1.05 * less.memory.streamed
    assert roomy.tokens_per_s >= 0.95 * less.tokens_per_s
    quicker = predicted(ram, 2.0)
    assert quicker.tokens_per_s >= less.tokens_per_s


def test_rows_of_tables_take_time_where_they_are_on_disk() -> None:
    costs = engine_costs(PC, IN_BLOCKS.in_place(), "stored")
    looking = replace(costs, rows=17, row_bytes=17 * 160)
    assert costs.look_up(100) == 0
    assert looking.look_up(100) == pytest.approx(1700 * PC.disk_row_s)
    slow = replace(looking, machine=replace(PC, disk_row_s=5e-3))
    steps = [StepTime(each, on_card=False).seconds(0.0) for each in (costs, looking, slow)]
    assert steps[0] < steps[1] < steps[2]
    assert steps[2] - steps[0] == pytest.approx(17 * 5e-3)
    job = JobRows(100, 50.0, 50.0)
    jobs = [predict_on_cpu(each, job, 16, sweep_tokens=1024).tokens_per_s for each in (costs, looking, slow)]
    assert jobs[0] > jobs[1] > jobs[2]


GB = 10**9
ROWS, COLUMNS = 320_000_000, 160

SHAPE = ModelShape(
    name="125B with a table of n-grams",
    hub_id="",
    licence="",
    source="transformers' configuration of qwen4_exp, scaled to 125 billion parameters, 6 of them active",
    layers=40,
    dense_layers=0,
    full_attention_layers=10,
    hidden=2560,
    vocabulary=248_320,
    experts=512,
    experts_per_token=10,
    expert_width=448,
    shared_width=512,
    dense_width=0,
    attention=AttentionShape(heads=16, kv_heads=2, head_dim=256),
    context_tokens=262_144,
    parameters=125e9,
    other_weights=125 * GB - 40 * 512 * 3 * 2560 * 448,
    table_weights=ROWS * COLUMNS,
    table_rows=16,
    table_columns=COLUMNS,
)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("label", ["Q4_K_M", "Q3_K"])
def test_it_is_planned_on_a_pc_with_32_gb_and_a_card_with_8(label: str) -> None:
    machine = read_machine("laptop-rtx-4060-8gb").with_memory(vram_bytes=8 * 2**30, ram_bytes=32 * 2**30)
    plan = make_plan(machine, as_quantised(SHAPE, label))
    assert plan.card is not None
    assert plan.table_bytes > 20 * GB
    assert plan.table_rows == 17  # of n-grams, and of the token itself
    assert plan.table_row_bytes < 16 * COLUMNS + 2 * SHAPE.hidden
    assert plan.ram.held < 32 * 2**30
    assert plan.card.weights < 8 * 2**30
    without = make_plan(
        machine,
        replace(as_quantised(SHAPE, label), table_weights=0, other_weights=SHAPE.other_weights - ROWS * COLUMNS),
    )
    assert plan.speed.decode_tokens_per_s == pytest.approx(without.speed.decode_tokens_per_s, rel=0.1)


def test_a_table_is_held_where_everything_fits() -> None:
    machine = read_machine("desktop-no-gpu-64gb").with_memory(ram_bytes=512 * 2**30)
    plan = make_plan(machine, SHAPE, limits=Limits(precision="bf16"))
    assert not plan.table_bytes
    assert plan.ram.weights > 2 * ROWS * COLUMNS


def sizes(*, experts: int = 10, table: int = 60, dense: int = 5) -> Sizes:
    weights = Weights(
        "bf16",
        (dense, dense + table),
        3,
        2 * dense + table + 3,
        tuple(Experts(experts, 8, layer) for layer in range(2)),
        tables=Tables((0, table), 0, table, table, 1, 16, 4),
    )
    return Sizes("a model", (weights,), (dense + 8 * experts, dense + table + 8 * experts), 3, 0, 0, 64, 2)


def placed(ram: int, card: int = 0, **more: int) -> Placement:
    devices = (DeviceBudget("a card", card, card),) if card else ()
    return resolve(EngineConfig("m"), Budgets(2**40, ram, devices), sizes(**more))


def test_a_table_leaves_memory_before_any_expert() -> None:
    everything = 160 + 60 + 13
    assert not placed(everything).tables.on_disk
    less = placed(everything - 1)
    assert (less.tables.on_disk, less.on_disk) == (60, 0)
    assert less.ram.dense == 14  # with the rows that are kept
    least = placed(14 + 160 - 1)
    assert (least.tables.on_disk, least.on_disk) == (60, 160)


def test_a_small_part_of_a_card_stays_with_the_table() -> None:
    """Its steps are not stopped for rows, and no RAM would come of it."""
    small, large = placed(210, 1000, experts=100), placed(210, 200, experts=100)
    assert small.devices
    assert small.on_disk
    assert not small.tables.on_disk
    assert large.devices
    assert large.on_disk
    assert large.tables.on_disk == 60
    assert large.devices[0].dense == small.devices[0].dense - 60
    none = placed(2000, 60, experts=100)
    assert none.devices
    assert none.tables.on_disk
