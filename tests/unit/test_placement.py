"""Where the parts of a model go: whatever sizes and budgets there are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common import footprint
from engine.common.config import MISSES, EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.formats import LADDER
from engine.planner.placement import (
    Budgets,
    DeviceBudget,
    Experts,
    NoteCode,
    NotEnoughRamError,
    Placement,
    Sizes,
    Weights,
    least_ram,
    resolve,
)
from engine.planner.plan_parts import Reach, best_in_reach

MIB = 2**20
CONTEXT = 2048
PLAIN = EngineConfig("m", precision="bf16")


def sizes(
    dense: int = 0,
    experts: int = 0,
    kv: int = 0,
    activations: int = 0,
    *,
    context: int = CONTEXT,
    layers: int = 1,
) -> Sizes:
    """A model in one precision: its experts are of 64 kB, or one of fewer bytes, in the first layer."""
    record = min(experts, 2**16)
    each = (dense // layers,) * layers
    groups = (Experts(record, -(-experts // record), 0),) if experts else ()
    weights = Weights("bf16", each, dense - sum(each), dense, groups)
    return Sizes("model", (weights,), each, 0, kv, activations, context, 2)


def budgets(*cards: int, ram: int = 2**40, allowed: int | None = None) -> Budgets:
    devices = tuple(DeviceBudget(f"card#{index}", size, size) for index, size in enumerate(cards))
    return Budgets(ram, allowed, devices)


def test_everything_on_the_card_if_it_fits_with_its_context() -> None:
    card = budgets(8 * MIB)
    assert resolve(PLAIN, card, sizes(2 * MIB, 4 * MIB)).all_experts
    assert not resolve(PLAIN, card, sizes(2 * MIB, 6 * MIB + 1)).all_experts
    assert not resolve(PLAIN, card, sizes(2 * MIB, 4 * MIB, MIB // 512)).all_experts
    assert resolve(PLAIN, card, sizes(8 * MIB)).all_experts


@pytest.mark.parametrize("wish", [{"cache_slots": 3}, {"misses": "cpu"}])
def test_who_asks_for_a_cache_gets_one(wish: dict[str, object]) -> None:
    config = replace(PLAIN, **wish)  # type: ignore[arg-type]
    assert not resolve(config, budgets(8 * MIB), sizes(MIB, MIB)).all_experts


def test_experts_of_several_cards_are_all_there_if_each_card_has_room_for_its_own() -> None:
    model = sizes(2 * MIB, layers=2)
    halves = (Experts(2**16, 32, 0), Experts(2**16, 32, 1))
    model = replace(model, weights=(replace(model.weights[0], experts=halves),))
    placement = resolve(PLAIN, budgets(6 * MIB, 6 * MIB), model)
    assert placement.all_experts
    assert [card.experts for card in placement.devices] == [2 * MIB] * 2
    assert [card.slots for card in placement.devices] == [32, 32]
    few = Budgets(2**40, None, (DeviceBudget("card#0", 6 * MIB, 6 * MIB), DeviceBudget("card#1", 6 * MIB, 2 * MIB)))
    placement = resolve(PLAIN, few, model)
    assert len(placement.devices) == 2
    assert not placement.all_experts
    assert not resolve(replace(PLAIN, cache_slots=2), budgets(6 * MIB, 6 * MIB), model).all_experts


@pytest.mark.parametrize(("dense", "short"), [(18 * MIB, 0), (12 * MIB, 1)])
def test_a_model_too_big_for_a_card_runs_on_the_cpu_and_it_is_said(dense: int, short: int) -> None:
    """Half of it is on each, because both have so much in all; of the second, others hold most."""
    cards = Budgets(2**40, None, (DeviceBudget("card#0", 8 * MIB, 8 * MIB), DeviceBudget("card#1", 8 * MIB, 4 * MIB)))
    placement = resolve(PLAIN, cards, sizes(dense, layers=2))
    assert (placement.devices, placement.reach) == ((), Reach.RAM)
    (note,) = placement.notes
    assert (note.code, note.device) == (NoteCode.ON_CPU, f"card#{short}")
    assert note.needed > note.room == cards.devices[short].free


def test_what_does_not_fit_is_refused_with_the_least_that_would_do() -> None:
    model = sizes(4 * MIB, 16 * MIB)
    with pytest.raises(NotEnoughRamError) as caught:
        resolve(PLAIN, budgets(allowed=MIB), model)
    assert caught.value.code is ErrorCode.NOT_ENOUGH_MEMORY
    least = caught.value.needed
    assert resolve(PLAIN, budgets(allowed=least), model).on_disk == 16 * MIB
    with pytest.raises(NotEnoughRamError):
        resolve(PLAIN, budgets(allowed=least - 1), model)


def test_auto_does_not_leave_the_card_for_a_better_quality() -> None:
    """However much RAM there is: what runs on the card in fewer bits is not moved to the CPU."""
    fine, coarse = sizes(9 * MIB, MIB).weights[0], replace(sizes(2 * MIB, MIB).weights[0], precision="int4")
    model = replace(sizes(9 * MIB, MIB), weights=(fine, coarse))
    placement = resolve(EngineConfig("m"), budgets(8 * MIB), model)
    assert (placement.precision, len(placement.devices)) == ("int4", 1)
    (note,) = placement.notes
    assert (note.code, note.precision, note.instead_of) == (NoteCode.COARSER_FOR_DEVICE, "int4", "bf16")
    assert note.needed > note.room == 8 * MIB
    assert resolve(EngineConfig("m"), budgets(), model).precision == "bf16"


@pytest.mark.parametrize(
    ("reach", "chosen"),
    [
        ((Reach.RAM, Reach.RAM, Reach.RAM), 0),
        ((Reach.DISK, Reach.RAM, Reach.RAM), 1),
        ((Reach.RAM, Reach.RAM, Reach.DEVICE), 2),
        ((Reach.DISK, Reach.DISK, Reach.DEVICE), 2),
        ((Reach.DISK, Reach.DISK, Reach.DISK), 2),
    ],
)
def test_the_best_quality_that_waits_for_the_nearest_memory(reach: tuple[Reach, ...], chosen: int) -> None:
    assert best_in_reach(dict(zip(LADDER, reach, strict=True))) == LADDER[chosen]
    assert best_in_reach({}) is None


# Whatever sizes and budgets


@st.composite
def models(draw: st.DrawFn, *, auto: bool = False) -> Sizes:
    """Of a few layers, some with experts of one of two layouts, in one precision or, from fine to coarse, in all."""
    layers = draw(st.integers(1, 8))
    dense = [draw(st.integers(0, 8 * MIB)) for _ in range(layers)]
    in_files = [draw(st.integers(0, each)) for each in dense] if draw(st.booleans()) else []
    elsewhere = draw(st.integers(0, 4 * MIB))
    records = [draw(st.integers(1, 64)) * 4096 for _ in range(2)]
    groups = [
        Experts(records[layout], draw(st.integers(1, 16)), layer, layout, is_on_demand=draw(st.integers(0, 9)) > 0)
        for layer in range(layers)
        if draw(st.booleans())
        for layout in [draw(st.integers(0, 1))]
    ]
    in_ram, working = sum(dense) + elsewhere, draw(st.integers(0, MIB))

    def weights(precision: str, part: int) -> Weights:
        return Weights(
            precision,
            tuple(each // part for each in dense),
            elsewhere // part,
            in_ram,
            tuple(replace(each, record=-(-each.record // part)) for each in groups),
            working,
            in_ram if part > 1 else 0,
            in_files=() if part > 1 else tuple(in_files),
        )

    return Sizes(
        "model",
        tuple(weights(precision, 2**at) for at, precision in enumerate(LADDER if auto else LADDER[:1])),
        tuple(each + sum(group.nbytes for group in groups if group.layer == at) for at, each in enumerate(dense)),
        elsewhere,
        kv_per_token=draw(st.integers(0, 4096)),
        activations_per_token=draw(st.integers(0, 8192)),
        context_tokens=draw(st.integers(1, 20_000)),
        experts_per_token=draw(st.integers(0, 4)),
    )


@st.composite
def machines(draw: st.DrawFn) -> Budgets:
    totals = [draw(st.integers(1, 32 * MIB)) for _ in range(draw(st.integers(0, 3)))]
    devices = tuple(
        DeviceBudget(f"card#{at}", total, draw(st.integers(total // 2, total))) for at, total in enumerate(totals)
    )
    return Budgets(draw(st.integers(1, 64 * MIB)), draw(st.none() | st.integers(1, 64 * MIB)), devices)


configs = st.builds(
    EngineConfig,
    model=st.just("m"),
    cache_slots=st.none() | st.integers(0, 20),
    cache_ways=st.none() | st.integers(1, 4),
    misses=st.sampled_from(MISSES),
    context_tokens=st.none() | st.just(500),
)


def tried(model: Sizes, there_is: Budgets, config: EngineConfig) -> Placement | None:
    try:
        return resolve(config, there_is, model)
    except EngineError as error:
        assert error.code is ErrorCode.NOT_ENOUGH_MEMORY  # noqa: PT017 - many cases do not raise
        return None


@given(models(auto=True), machines(), configs)
def test_never_more_than_there_is(model: Sizes, there_is: Budgets, config: EngineConfig) -> None:
    """Of any device or of the RAM; and everything lies somewhere."""
    placement = tried(model, there_is, config)
    if placement is None:
        return
    assert placement.ram.held <= there_is.ram_usable
    weights = next(each for each in model.weights if each.precision == placement.precision)
    if not placement.devices:
        streamed = placement.streamed
        assert placement.ram.dense == weights.dense_in_ram - streamed.nbytes + streamed.window
        assert streamed.nbytes == sum(weights.in_files[layer] for layer in streamed.layers)
    else:
        assert sum(device.dense for device in placement.devices) == sum(weights.dense_layers) + weights.dense_elsewhere
        for held, device in zip(placement.devices, there_is.devices, strict=True):
            fewest = held.dense + held.activations + min(held.kv, footprint.FEWEST_KV_TOKENS * model.kv_per_token)
            assert fewest <= device.free
            if held.experts + held.staging:
                assert held.held <= device.free
        activations = placement.chunk_tokens * model.activations_per_token
        assert all(activations <= held.activations for held in placement.devices)
    anywhere = placement.ram.experts - placement.ram.slots + placement.on_disk
    assert anywhere == (0 if placement.all_experts else weights.experts_nbytes)
    assert 0 <= placement.context_tokens <= model.context_tokens


@given(models(), machines(), configs, st.integers(1, 6), st.integers(0, 64 * MIB))
def test_more_memory_never_holds_less(
    model: Sizes, there_is: Budgets, config: EngineConfig, times: int, more: int
) -> None:
    """In one precision; cards grow alike, so that layers stay where they are."""
    before = tried(model, there_is, config)
    allowed = there_is.ram_allowed
    after = tried(
        model,
        Budgets(
            there_is.ram_free + more,
            None if allowed is None else allowed + more,
            tuple(replace(device, total=device.total * times, free=device.free * times) for device in there_is.devices),
        ),
        config,
    )
    if before is None:
        return
    assert len(after.devices) >= len(before.devices)
    assert after.all_experts >= before.all_experts
    for held, holds in zip(after.devices, before.devices, strict=False):
        assert held.dense == holds.dense
        assert held.slots >= holds.slots
        assert held.kv >= holds.kv
    if before.devices:
        assert after.context_tokens >= before.context_tokens
        assert after.chunk_tokens >= before.chunk_tokens
    assert len(after.streamed.layers) <= len(before.streamed.layers)
    if (before.all_experts, before.streamed) == (after.all_experts, after.streamed):
        assert after.ram.experts >= before.ram.experts
        assert after.on_disk <= before.on_disk


def test_layers_that_do_not_fit_leave_room_for_the_others() -> None:
    """As few of them as do, far from one another, and as many as it takes before a model is refused."""
    each, beside = (8 * MIB,) * 12, 3 * MIB
    weights = Weights("bf16", each, beside, 96 * MIB + beside, in_files=(*each[:-1], 2 * MIB))
    model = Sizes("model", (weights,), each, beside, 0, 0, CONTEXT, 1)
    whole = resolve(PLAIN, budgets(allowed=99 * MIB), model)
    assert (whole.streamed.layers, whole.reach) == ((), Reach.RAM)
    few = resolve(PLAIN, budgets(allowed=99 * MIB - 1), model)
    assert few.streamed.layers == (1, 5, 9)
    assert (few.streamed.nbytes, few.streamed.window, few.ram.dense) == (24 * MIB, 16 * MIB, 91 * MIB)
    assert few.reach is Reach.DISK
    with pytest.raises(NotEnoughRamError, match="even with its layers read from disk") as caught:
        resolve(PLAIN, budgets(allowed=1), model)
    least = caught.value.needed
    assert least == least_ram(model) == beside + 8 * MIB + 16 * MIB  # the last one has too little in files
    assert resolve(PLAIN, budgets(allowed=least), model).streamed.layers == tuple(range(11))
    with pytest.raises(NotEnoughRamError):
        resolve(PLAIN, budgets(allowed=least - 1), model)


@given(models(), st.integers(1, 96 * MIB))
def test_nothing_is_refused_above_the_least_that_is_named(model: Sizes, ram: int) -> None:
    if tried(model, budgets(allowed=ram), PLAIN) is not None:
        return
    with pytest.raises(NotEnoughRamError) as caught:
        resolve(PLAIN, budgets(allowed=ram), model)
    needed = caught.value.needed
    assert needed > ram
    assert resolve(PLAIN, budgets(allowed=needed), model).ram.held <= needed
    assert tried(model, budgets(allowed=needed - 1), PLAIN) is None


@given(models(), st.integers(1, 32 * MIB), st.integers(0, MIB), configs)
def test_a_few_more_bytes_of_a_card_never_hold_less(model: Sizes, free: int, more: int, config: EngineConfig) -> None:
    before = tried(model, budgets(free), config)
    after = tried(model, budgets(free + more), config)
    assert after.slots >= before.slots
    assert len(after.devices) >= len(before.devices)


@given(models(auto=True), machines(), configs, st.integers(0, 64 * MIB))
def test_more_ram_never_takes_a_model_off_the_card(
    model: Sizes, there_is: Budgets, config: EngineConfig, more: int
) -> None:
    """Nor, where it was on none, to a coarser precision."""
    before = tried(model, there_is, config)
    allowed = there_is.ram_allowed
    grown = replace(
        there_is, ram_free=there_is.ram_free + more, ram_allowed=None if allowed is None else allowed + more
    )
    after = tried(model, grown, config)
    if before is None:
        return
    assert after.reach <= before.reach
    if before.reach is not Reach.DISK and after.reach is before.reach:
        assert LADDER.index(after.precision) <= LADDER.index(before.precision)


@given(models(auto=True), machines(), configs)
def test_nothing_else_than_what_is_given_matters(model: Sizes, there_is: Budgets, config: EngineConfig) -> None:
    seen = (repr(model), repr(there_is), repr(config))
    first = tried(model, there_is, config)
    assert (repr(model), repr(there_is), repr(config)) == seen
    assert tried(model, there_is, config) == first
