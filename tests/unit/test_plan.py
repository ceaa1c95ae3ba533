"""Plans: bytes that add up, settings that the engine can be run with, and refusals that name what would do."""

import json
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.model_shape import model_names, read_model
from engine.common.errors import EngineError, ErrorCode
from engine.formats import LADDER
from engine.hardware.machine import HardwareProfile, machine_names, read_machine
from engine.planner.costs import engine_costs
from engine.planner.engine_memory import sizes_of
from engine.planner.placement import least_ram
from engine.planner.plan import Limits, Plan, make_plan
from engine.planner.plan_parts import BATCH, WORKLOADS, Workload, total_held
from engine.planner.plan_search import runs_here
from engine.planner.plan_words import Change, picture_words, what_if
from tests.refusals import refused

_GIB = 2**30
QWEN, DEEPSEEK, MIXTRAL = read_model("qwen3-30b-a3b"), read_model("deepseek-v3"), read_model("mixtral-8x7b")
SMALL = read_model("gpt-oss-20b")
GAMER, BARE, LARGE = (
    read_machine(name) for name in ("desktop-rtx-3060-12gb", "desktop-no-gpu-64gb", "desktop-rtx-5090-32gb")
)


@settings(max_examples=3, deadline=None)
@given(
    machine=st.sampled_from(machine_names()),
    model=st.sampled_from(model_names()),
    workload=st.sampled_from(sorted(WORKLOADS)),
    vram=st.none() | st.integers(_GIB, 32 * _GIB),
    ram=st.none() | st.integers(2 * _GIB, 128 * _GIB),
    context=st.none() | st.integers(1, 200_000),
)
def test_any_plan_stays_within_its_limits(
    machine: str, model: str, workload: str, vram: int | None, ram: int | None, context: int | None
) -> None:
    limits = Limits(vram_bytes=vram, ram_bytes=ram, context_tokens=context)
    try:
        plan = make_plan(read_machine(machine), read_model(model), WORKLOADS[workload], limits)
    except EngineError as error:
        refused = error
    else:
        assert_sound(plan)
        return
    assert refused.code is ErrorCode.NOT_ENOUGH_MEMORY
    assert refused.message.endswith(".")


def assert_sound(plan: Plan) -> None:
    for tier in (plan.card, plan.ram):
        if tier is None:
            continue
        assert all(getattr(tier, part.name) >= 0 for part in fields(tier))
        assert tier.held + tier.headroom + tier.other_programs <= tier.total * 1.0001
    if plan.card is not None and plan.limits.vram_bytes is not None:
        assert plan.card.held <= plan.limits.vram_bytes * read_machine(plan.machine).gpu.count  # type: ignore[union-attr]
    if plan.limits.ram_bytes is not None:
        # As in the engine, the budget is for weights: the KV of a conversation is part of the headroom.
        assert plan.ram.held - plan.ram.kv <= plan.limits.ram_bytes * 1.0001
    assert plan.precision in LADDER
    assert runs_here(plan.policy, plan.workload)
    assert all(other.runs_here == runs_here(other.policy, plan.workload) for other in plan.alternatives)
    assert 0 < plan.speed.low < plan.speed.decode_tokens_per_s < plan.speed.high
    assert plan.speed.ttft_s > 0
    for sentence in (plan.bottleneck, plan.what_helps):
        assert sentence.endswith(".")
    config = plan.engine_config("folder")
    assert (config.device == "cpu") == (plan.card is None)
    assert config.precision == plan.precision
    json.dumps(asdict(plan), default=str)


def test_what_others_hold_and_what_is_left_free_is_not_planned_with() -> None:
    alone = make_plan(GAMER, SMALL)
    shared = make_plan(GAMER, SMALL, limits=Limits(vram_of_others=4 * _GIB, precision=alone.precision))
    assert alone.card is not None
    assert shared.card is not None
    assert shared.card.other_programs == 4 * _GIB
    assert shared.cache.slots < alone.cache.slots
    assert shared.card.experts < alone.card.experts


def test_without_a_card_everything_is_in_ram() -> None:
    plan = make_plan(BARE, QWEN, limits=Limits(threads=4))
    assert plan.card is None
    assert plan.policy == "CPU only"
    assert plan.threads == 4
    assert plan.engine_config("m").threads == 4
    assert plan.roofline.gpu_flops == 0
    assert "RAM" in plan.bottleneck


@pytest.mark.parametrize("machine", [BARE, LARGE], ids=["RAM", "card"])
def test_rows_that_are_answered_together_hold_keys_and_values(machine: HardwareProfile) -> None:
    alone, few, many, more = (
        make_plan(machine, SMALL, Workload("rows", 256, 64, rows), Limits(precision="int4"))
        for rows in (1, 64, 256, 512)
    )
    held = [(plan.card or plan.ram).kv for plan in (alone, few, many, more)]
    assert held[1] == SMALL.context_bytes(320, in_pages=True) * 64
    assert held[0] < held[1] < held[2] == held[3]  # no more are in progress at once


def test_experts_that_do_not_fit_are_on_disk_and_more_ram_or_a_faster_disk_helps() -> None:
    plan = make_plan(BARE, DEEPSEEK)
    assert plan.disk_bytes > 300e9
    assert "disk" in plan.bottleneck
    assert plan.helps[0].gain >= plan.helps[-1].gain > 1
    assert {"RAM", "disk"} & set(plan.what_helps.split())


def test_the_precision_asked_for_is_kept_and_others_are_alternatives() -> None:
    plan = make_plan(GAMER, QWEN, limits=Limits(precision="bf16"))
    assert plan.precision == "bf16"
    assert {other.precision for other in plan.alternatives} >= {"int8", "int4"}
    speeds = [other.speed.tokens_per_s for other in plan.alternatives]
    assert speeds == sorted(speeds, reverse=True)


def test_a_batch_is_planned_with_its_sizes() -> None:
    plan = make_plan(read_machine("klotski-rtx-3090"), MIXTRAL, BATCH)
    assert plan.batch is not None
    assert plan.batch.sequences == min(plan.batch.micro_batch * plan.batch.batches, BATCH.sequences)
    assert [point.name for point in plan.roofline.points] == ["decode", "prefill", "batch"]


def test_a_model_that_fits_nowhere_names_the_memory_it_needs() -> None:
    tiny = BARE.with_memory(ram_bytes=3 * _GIB)
    with pytest.raises(EngineError, match="GB of RAM") as caught:
        make_plan(tiny, DEEPSEEK)
    assert caught.value.code is ErrorCode.NOT_ENOUGH_MEMORY
    least = least_ram(sizes_of(engine_costs(BARE, QWEN, "bf16"), Limits(), ["bf16"]))
    with refused(ErrorCode.NOT_ENOUGH_MEMORY, "at bf16 with its experts and layers read from disk"):
        make_plan(BARE, QWEN, limits=Limits(precision="bf16", ram_bytes=least - 1))


def test_auto_is_a_precision_that_can_be_loaded() -> None:
    """However fast a precision would be, a plan only uses one that fits into RAM."""
    limits = Limits(ram_bytes=least_ram(sizes_of(engine_costs(BARE, QWEN, "int4"), Limits(), ["int4"])))
    assert make_plan(BARE, QWEN, limits=limits).precision == "int4"
    assert limits.ram_bytes is not None
    slowly = make_plan(BARE, QWEN, limits=replace(limits, ram_bytes=limits.ram_bytes - 1))
    assert slowly.precision == "bf16"  # whose layers the files have as they are used
    assert slowly.streamed_bytes
    least = least_ram(sizes_of(engine_costs(BARE, QWEN, "bf16"), Limits(), ["bf16"]))
    with refused(ErrorCode.NOT_ENOUGH_MEMORY, "at bf16 with its experts and layers read from disk"):
        make_plan(BARE, QWEN, limits=replace(limits, ram_bytes=least - 1))


def test_what_if_changes_only_what_is_said() -> None:
    assert what_if(GAMER, Change()) == GAMER
    richer = what_if(GAMER, Change(vram_bytes=24 * _GIB, ram_bytes=128 * _GIB, disk_bytes_per_s=1e10))
    assert (richer.vram_bytes, richer.cpu.ram_bytes, richer.disk_bytes_per_s) == (24 * _GIB, 128 * _GIB, 1e10)
    linked = what_if(GAMER, Change(link_bytes_per_s=50e9))
    assert linked.link.h2d == 50e9
    assert linked.link.h2d_pageable == pytest.approx(2 * GAMER.link.h2d_pageable)
    with_card = what_if(BARE, Change(gpu=GAMER))
    assert with_card.gpu == GAMER.gpu
    with refused(ErrorCode.INVALID_REQUEST, "graphics card"):
        what_if(BARE, Change(vram_bytes=8 * _GIB))


def test_pictures_are_read_where_that_is_faster_and_there_is_room() -> None:
    seeing = replace(SMALL, sees=True, tower_weights=600 * 10**6, picture_gflops=7_000)
    slow_link = replace(GAMER, link=replace(GAMER.link, h2d=2e7, h2d_pageable=2e7))
    seconds = []
    for machine, on_card in ((BARE, False), (GAMER, True), (slow_link, False)):
        found = make_plan(machine, seeing).pictures
        assert found is not None
        assert (found.on_card, found.nbytes) == (on_card, 1_200 * 10**6)
        seconds.append(found.seconds)
        assert picture_words(found).endswith(f"on {'the graphics card' if on_card else 'the CPU'}, 1.2 GB")
    assert seconds[1] < min(seconds[0], seconds[2])
    plan = make_plan(BARE, seeing)
    assert plan.ram.pictures == 1_200 * 10**6
    assert plan.ram.held == sum(total_held(plan.ram).values()) - plan.ram.headroom - plan.ram.other_programs
    assert make_plan(BARE, SMALL).pictures is None
    full = replace(seeing, tower_weights=20 * 10**9)  # no card has room for it
    assert not make_plan(GAMER, full).pictures.on_card  # type: ignore[union-attr]
