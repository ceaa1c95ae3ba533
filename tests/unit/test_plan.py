"""Plans: bytes that add up, settings that the engine can be run with, and refusals that name what would do."""

import json
import random
from dataclasses import asdict, fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.model_shape import model_names, read_model
from engine.common.errors import EngineError, ErrorCode
from engine.formats import LADDER
from engine.hardware.machine import HardwareProfile, machine_names, read_machine
from engine.planner.costs import engine_costs
from engine.planner.engine_memory import sizes_of
from engine.planner.placement import least_ram
from engine.planner.plan import Limits, Plan, _memory, make_plan
from engine.planner.plan_parts import BATCH, WORKLOADS, Workload, total_held
from engine.planner.plan_search import Question, choose_precision, in_order, runs_here, search
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
    assert plan.batch.sequences == min(plan.batch.micro_batch * plan.batch.batches, BATCH.sequences)
    assert [point.name for point in plan.roofline.points] == ["decode", "prefill", "batch"]


def test_a_model_that_fits_nowhere_names_the_memory_it_needs() -> None:
    tiny = BARE.with_memory(ram_bytes=3 * _GIB)
    with refused(ErrorCode.NOT_ENOUGH_MEMORY, match="GB of RAM"):
        make_plan(tiny, DEEPSEEK)
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


_CELLS = [(machine, model, work) for machine in machine_names() for model in model_names() for work in WORKLOADS]
_SHUFFLED = random.Random(5).sample(_CELLS, len(_CELLS))
_NOT_HERE = 1.3
"""How many times as fast a schedule may be that the engine has for many prompts only, given a single one: for a long
prompt it copies whole layers during attention, where a chat waits for the router (1.263 for GLM-4.5 on an RTX 3090)."""


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("cell", _SHUFFLED[:5], ids="/".join)
def test_no_policy_is_faster_than_the_plan(cell: tuple[str, str, str]) -> None:
    assert_nobody_is_faster(*cell)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("cell", _SHUFFLED[8:10], ids="/".join)
def test_a_plan_takes_the_first_of_them(cell: tuple[str, str, str]) -> None:
    machine, model, work = cell
    question = assert_nobody_is_faster(machine, model, work)
    able = [one for one in in_order(search(question), question.workload) if _memory(question, one) is not None]
    if not able:
        with refused(ErrorCode.NOT_ENOUGH_MEMORY):
            make_plan(question.machine, question.model, question.workload)
        return
    plan = make_plan(question.machine, question.model, question.workload)
    assert (plan.policy, plan.precision) == (able[0].policy, question.precision)
    assert plan.speed.tokens_per_s == able[0].tokens_per_s
    assert runs_here(plan.policy, question.workload)


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.timeout(3600)
def test_no_policy_is_faster_than_the_plan_in_any_cell(machine: str) -> None:
    for cell in _CELLS:
        if cell[0] == machine:
            assert_nobody_is_faster(*cell)


def assert_nobody_is_faster(machine: str, model: str, work: str) -> Question:
    """At the plan's precision and with the memory that the engine may use, by the same simulator."""
    question = Question(read_machine(machine), read_model(model), WORKLOADS[work], Limits(), "int4")
    question = replace(question, precision=choose_precision(question))
    outcomes = search(question)
    able = in_order(outcomes, question.workload)
    if not able:
        assert not outcomes
        return question
    ours = able[0].tokens_per_s
    for other in outcomes:
        allowed = 1.0 if runs_here(other.policy, question.workload) else _NOT_HERE
        assert other.tokens_per_s <= (1 + 1e-6) * allowed * ours, (other.policy, able[0].policy)
    return question


_FILES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ2_XXS", "IQ1_S")


def _speeds(machine: str, model: str) -> list[float]:
    """Of those of a model's files that fit, the biggest first."""
    found = []
    for label in _FILES:
        try:
            plan = make_plan(read_machine(machine), as_quantised(read_model(model), label))
        except EngineError as error:
            if error.code is not ErrorCode.NOT_ENOUGH_MEMORY:
                raise
        else:
            found.append(plan.speed.tokens_per_s)
    return found


def assert_a_smaller_file_is_never_slower(machine: str, model: str) -> None:
    speeds = _speeds(machine, model)
    assert all(after >= 0.99 * before for before, after in pairwise(speeds)), (model, speeds)


def test_a_smaller_file_is_never_slower() -> None:
    assert_a_smaller_file_is_never_slower("desktop-no-gpu-64gb", "qwen3-30b-a3b")


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.timeout(3600)
def test_a_smaller_file_is_never_slower_in_any_cell(machine: str) -> None:
    for model in model_names():
        assert_a_smaller_file_is_never_slower(machine, model)
