"""A model of 125 billion parameters of which 51 are one table: planned for a small PC, the table where it lies."""

from dataclasses import replace

import pytest

from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.model_shape import AttentionShape, ModelShape
from engine.common.config import EngineConfig
from engine.hardware.machine import read_machine
from engine.planner.placement import (
    Budgets,
    DeviceBudget,
    Experts,
    Placement,
    Sizes,
    Tables,
    Weights,
    resolve,
)
from engine.planner.plan import Limits, make_plan

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
