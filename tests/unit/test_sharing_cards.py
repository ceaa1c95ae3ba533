"""Several cards: what the planner says of each way to share a model among them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.model_shape import read_model
from engine.common.config import EngineConfig
from engine.hardware.machine import HardwareProfile, read_machine
from engine.hardware.measured import machine_profile
from engine.planner.costs import Cards, engine_costs, most_on_one
from engine.planner.placement import (
    Budgets,
    DeviceBudget,
    Experts,
    NoteCode,
    Sizes,
    Weights,
    expert_ranges,
    resolve,
)
from engine.planner.plan import make_plan
from engine.planner.plan_parts import CHAT, Limits, Workload
from engine.planner.plan_search import Question, run_shared, ways_to_share
from engine.planner.step_time import StepTime
from tests.unit.test_hardware_measured import PROBE, RTX

GIB = 2**30


def two_cards() -> HardwareProfile:
    return read_machine("desktop-2x-rtx-3090")


def one_card() -> HardwareProfile:
    machine = two_cards()
    assert machine.gpu is not None
    return replace(machine, gpu=replace(machine.gpu, count=1))


def with_peers(machine: HardwareProfile, gbps: float) -> HardwareProfile:
    return replace(machine, link=replace(machine.link, peer=gbps * 1e9))


def test_cards_that_share_experts_read_them_at_once() -> None:
    model = read_model("mixtral-8x7b")
    one = engine_costs(one_card(), model, "bf16")
    two = engine_costs(with_peers(two_cards(), 50), model, "bf16", cards=Cards.EXPERTS)
    assert two.gpu_layer(1, 512) == one.gpu_layer(1, 512)
    many = two.gpu_experts(1024, 8, grouped=True) / one.gpu_experts(1024, 8, grouped=True)
    assert 0.5 < many < 0.75
    # Both experts of a token are on the same card half of the time.
    assert 0.7 < two.gpu_experts(2, 2, grouped=True) / one.gpu_experts(2, 2, grouped=True) < 0.85
    assert two.h2d_of_experts(1e9) == pytest.approx(one.h2d_of_experts(1e9) / 2, rel=0.01)
    assert two.h2d(1e9) == one.h2d(1e9)


def test_heads_of_a_chat_are_worth_sharing_at_long_contexts_alone() -> None:
    """Why each card has heads of keys and values in batches, and the first one has all of them in chats."""
    model = read_model("qwen3-30b-a3b")
    costs = engine_costs(two_cards(), model, "int4", cards=Cards.EXPERTS)
    link, attention = costs.machine.link, model.attention
    queries = 2.0 * attention.heads * attention.head_dim / 2
    crossing = link.between_cards(queries + attention.kv_elements) + link.between_cards(queries)
    more = crossing + costs.dispatch.card_s / 2

    def gain(context: int) -> float:
        step = StepTime(costs, context=context).seconds(0.3)
        return model.layers * (costs.card_attention(1, context) / 2 - more) / step

    assert gain(2048) == pytest.approx(-0.13, abs=0.02)
    assert -0.05 < gain(2**15) < 0.05
    assert gain(2**17) == pytest.approx(0.17, abs=0.03)


@given(st.integers(1, 16), st.integers(2, 4))
def test_the_busiest_card_is_what_draws_say(experts: int, cards: int) -> None:
    drawn = random.Random(experts * 7 + cards)
    seen = []
    for _ in range(2000):
        counts = [0] * cards
        for _ in range(experts):
            counts[drawn.randrange(cards)] += 1
        seen.append(max(counts))
    assert most_on_one(experts, cards) == pytest.approx(sum(seen) / len(seen), rel=0.05)


@given(st.integers(5, 300), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_every_expert_is_on_one_card_and_every_card_has_one(count: int, shares: list[int]) -> None:
    ranges = expert_ranges(count, shares)
    assert [expert for own in ranges for expert in own] == list(range(count))
    assert all(ranges)
    for own, share in zip(ranges, shares, strict=True):
        if sum(shares):
            assert abs(len(own) - count * share / sum(shares)) <= len(shares)


def test_a_chat_on_two_cards_is_never_said_to_be_twice_as_fast() -> None:
    model = read_model("gpt-oss-20b")
    fits = make_plan(one_card(), model, CHAT, Limits(precision="int4"))
    both = make_plan(two_cards(), model, CHAT, Limits(precision="int4"))
    assert both.cache.all_experts == fits.cache.all_experts
    assert both.speed.decode_tokens_per_s <= 1.05 * fits.speed.decode_tokens_per_s
    assert both.sharing == "layers"
    assert "one after the other" in both.sharing_words
    assert fits.sharing_words == ""
    assert fits.sharing == "auto"
    assert both.engine_config("m").sharing == "layers"


def test_more_of_a_model_fits_two_cards() -> None:
    model = read_model("mixtral-8x7b")
    one, two = (make_plan(machine, model, CHAT, Limits(precision="bf16")) for machine in (one_card(), two_cards()))
    assert two.cache.slots > 1.8 * one.cache.slots
    assert two.speed.decode_tokens_per_s > 1.1 * one.speed.decode_tokens_per_s


def test_batches_share_each_layers_experts() -> None:
    work = Workload("batch", 256, 64, 512)
    model = read_model("mixtral-8x22b")
    rates, away = {}, {}
    for name, machine in (("one", one_card()), ("two", with_peers(two_cards(), 50))):
        plan = make_plan(machine, model, work, Limits(precision="int4"))
        rates[name], away[name] = plan.batch.tokens_per_s, 1 - plan.batch.weights_on_card
        if name == "two":
            assert plan.sharing == "experts"
            assert "experts" in plan.sharing_words
    # Each link brings half of what is away, and more of the experts stay where there is twice the memory.
    assert 1.3 < rates["two"] / rates["one"] < 2.05 * away["one"] / away["two"]


def test_what_is_asked_for_is_planned() -> None:
    model = read_model("mixtral-8x7b")
    question = Question(two_cards(), model, CHAT, Limits(sharing="experts"), "int4")
    assert ways_to_share(question) == (Cards.EXPERTS,)
    assert {one.cards for one in run_shared(question, 4, ["Switchyard mixed"])} == {Cards.EXPERTS}
    assert ways_to_share(replace(question, limits=Limits())) == (Cards.LAYERS, Cards.EXPERTS)
    assert ways_to_share(replace(question, machine=one_card())) == (Cards.LAYERS,)
    assert ways_to_share(replace(question, limits=Limits(use_card=False))) == (Cards.LAYERS,)


def sizes(experts: int = 8, layers: int = 4) -> Sizes:
    record = 2**20
    weights = Weights(
        "bf16",
        (2**20,) * layers,
        4 * 2**20,
        8 * 2**20,
        tuple(Experts(record, experts, layer) for layer in range(layers)),
    )
    return Sizes("tiny", (weights,), (2**20 + experts * record,) * layers, 4 * 2**20, 1024, 1024, 4096, 2)


def budgets(*free: int, ram: int = 4 * GIB) -> Budgets:
    return Budgets(ram, None, tuple(DeviceBudget(f"card{index}", nbytes, nbytes) for index, nbytes in enumerate(free)))


def test_shares_follow_the_room_that_each_card_has() -> None:
    config = EngineConfig("tiny", sharing="experts")
    even = resolve(config, budgets(2**25, 2**25), sizes())
    assert even.of_layer == ()
    assert not even.all_experts
    assert len(even.shares) == 2
    assert even.shares[0] < even.shares[1]  # all else is on the first
    big = resolve(config, budgets(2**25, 2**27), sizes())
    first, second = (len(own) for own in expert_ranges(8, big.shares))
    assert second > 2 * first
    assert big.devices[0].dense > 0
    assert big.devices[1].dense == 0


def test_where_one_card_has_no_room_for_all_else_layers_are_shared_and_it_is_said() -> None:
    config = EngineConfig("tiny", sharing="experts")
    placed = resolve(config, budgets(7 * 2**20, 2**25), sizes())
    assert placed.shares == ()
    assert placed.of_layer
    assert placed.notes[0].code is NoteCode.SHARED_BY_LAYERS
    assert resolve(EngineConfig("tiny"), budgets(2**25, 2**25), sizes()).shares == ()
    assert resolve(config, budgets(2**25), sizes()).shares == ()


def test_all_cards_of_this_machine_are_planned_with() -> None:
    small = replace(RTX, name="NVIDIA GeForce RTX 3060", total_bytes=12 * GIB, free_bytes=10 * GIB)
    big = replace(RTX, name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB, free_bytes=23 * GIB)
    shown = replace(small, name="Intel graphics", is_integrated=True)
    both = replace(PROBE, gpus=(shown, big, small))
    machine = machine_profile(both, None)
    assert machine.gpu.count == 2
    assert machine.vram_bytes == 36 * GIB
    one = machine_profile(replace(PROBE, gpus=(small,)), None).gpu
    assert machine.gpu.bytes_per_s == one.bytes_per_s  # as fast as the slower
    assert both.vram_in_use == 3 * GIB
    assert both.compute_gpus == (big, small)


@given(st.floats(1, 300), st.integers(1, 8))
def test_the_busiest_card_has_its_share_at_least_and_no_more_than_all(experts: float, cards: int) -> None:
    most = most_on_one(experts, cards)
    assert experts / cards - 1e-9 <= most <= experts + 1e-9
    assert most_on_one(experts + 1, cards) >= most - 1e-9


@given(st.integers(2, 4), st.integers(4, 64))
def test_of_all_experts_each_card_has_its_share(cards: int, experts: int) -> None:
    assert most_on_one(experts, cards, experts) == pytest.approx(experts / cards)
    assert most_on_one(1, cards, experts) == 1
