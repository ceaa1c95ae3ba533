"""Whatever an engine reports becomes figures that can be drawn."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.models.cache_figures import FREE, forecast, memory_places, policies, room_slots, sound
from engine.protocol import CacheReport, MemoryPart, PolicyRate, PredictorRate, TierReport
from tests.app.cache_reports import MIB, report, tier

ANY_INT = st.integers(-(2**70), 2**70)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
TIERS = st.builds(
    TierReport,
    tier=st.sampled_from(["vram", "ram"]),
    slots=ANY_INT,
    most_slots=ANY_INT,
    record_bytes=ANY_INT,
    hits=ANY_INT,
    lookups=ANY_INT,
    recent_hit_rate=ANY_FLOAT,
    policy=st.text(max_size=9),
    is_adaptive=st.booleans(),
    shadows=st.lists(st.builds(PolicyRate, st.text(max_size=5), ANY_FLOAT), max_size=20).map(tuple),
    arriving=ANY_INT,
    evictions=ANY_INT,
    prefetched=ANY_INT,
    prefetches_used=ANY_INT,
    prefetches_wasted=ANY_INT,
)
REPORTS = st.builds(
    CacheReport,
    tiers=st.lists(TIERS, max_size=4).map(tuple),
    curve_slots=st.lists(ANY_INT, max_size=6).map(tuple),
    curve_hit_rates=st.lists(ANY_FLOAT, max_size=6).map(tuple),
    steps_per_s=ANY_FLOAT,
    lookups_per_step=ANY_FLOAT,
    hit_s=ANY_FLOAT,
    miss_s=ANY_FLOAT,
    adopted=st.text(max_size=5),
    ahead=ANY_INT,
    predictors=st.lists(
        st.builds(PredictorRate, st.text(max_size=5), ANY_INT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT), max_size=3
    ).map(tuple),
    memory=st.lists(
        st.builds(
            MemoryPart, st.sampled_from(["ram", "cuda:0"]), st.sampled_from(["total", "free", "kv", "?"]), ANY_INT
        ),
        max_size=8,
    ).map(tuple),
)


@settings(max_examples=60)
@given(REPORTS)
def test_nonsense_becomes_something_that_can_be_drawn(nonsense: CacheReport) -> None:
    clean = sound(nonsense)
    known = forecast(clean)
    for each in clean.tiers:
        assert 0 <= each.slots <= each.most_slots
        assert 0 <= each.hits <= each.lookups
        assert each.slots <= room_slots(clean, each, None) <= each.most_slots
        assert all(0 <= policy.hit_rate <= 1 or policy.hit_rate == -1 for policy in policies(each))
    for shares in (known.hit_rates, known.lru_rates):
        assert np.isfinite(shares).all()
        assert (shares >= 0).all()
        assert (shares <= 1).all()
    assert np.isfinite(known.tokens_per_s).all()
    for amounts, total in memory_places(clean.memory).values():
        assert sum(amounts.values()) == total
        assert all(nbytes >= 0 for nbytes in amounts.values())


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0, 1), st.integers(1, 999), st.booleans())
@example([0.0, 1.0, 1.0], 0.5, 1, False)
@example([2.3e-308, 2.3e-308, 1.0], 0.5, 1, False)
def test_the_expected_rate_goes_through_the_measured_one_and_never_falls(
    rates: list[float], measured: float, slots: int, adaptive: bool
) -> None:
    sizes = np.linspace(0, 1000, len(rates)).round().astype(int)
    told = report(
        tier(slots=slots, most=1000, recent_hit_rate=measured, is_adaptive=adaptive),
        curve_slots=tuple(sizes.tolist()),
        curve_hit_rates=tuple(sorted(rates)),
    )
    known = forecast(sound(told))
    now = known.hit_rate_at(slots)
    assert now is not None
    assert now >= measured - 1e-9
    if sorted(rates)[0] > 0 or adaptive:
        assert now == pytest.approx(measured, abs=1e-6)
    assert (np.diff(known.hit_rates) >= -1e-12).all()
    assert known.slots[-1] == 1000


def test_where_a_miss_is_as_cheap_as_a_hit_nothing_is_predicted() -> None:
    known = forecast(report(hit_s=2e-4, miss_s=1e-4))
    assert known.gains_nothing
    assert known.tokens_per_s_at(3000) is None
    assert known.hit_rate_at(3000) is not None


def test_a_popular_few_are_worth_more_than_a_cyclic_lru() -> None:
    """LRU hits nothing until all fit; who keeps the popular ones hits in proportion all the same."""
    told = report(
        tier(slots=72, most=240, recent_hit_rate=0.33, policy="static"),
        curve_slots=(0, 200, 210, 240),
        curve_hit_rates=(0.0, 0.0, 1.0, 1.0),
    )
    known = forecast(told)
    assert known.hit_rate_at(72) == pytest.approx(0.33, abs=1e-3)
    half = known.hit_rate_at(156)
    assert half is not None
    assert half == pytest.approx(0.66, abs=0.02)


def test_room_ends_where_memory_does() -> None:
    told = report()
    assert room_slots(told, told.tiers[0]) == 1000 + 750
    assert room_slots(told, tier("ram"), free_ram=10 * MIB) == 1005
    assert room_slots(told, tier("ram")) == 6144


def test_the_policy_that_decides_is_among_its_shadows_once() -> None:
    names = [each.name for each in policies(tier())]
    assert names == ["lfru", "lfu", "lru", "random"]
    assert next(each.name for each in policies(tier(policy="static"))) == "static"


def test_parts_of_memory_fill_their_place() -> None:
    places = memory_places(report().memory)
    assert places["cuda:0"][0][FREE] == 1500 * MIB
    assert places["ram"] == ({"experts": 700 * MIB, "other": 300 * MIB, FREE: 0}, 1000 * MIB)
    short = (MemoryPart("ram", "kv", 5), MemoryPart("ram", "total", 3))
    assert memory_places(short)["ram"] == ({"kv": 5, FREE: 0}, 5)


@given(st.integers(0, 6000), st.integers(1, 6144), st.floats(0, 1), st.floats(0, 1), st.floats(1e-5, 0.1))
@example(0, 6144, 0.0, 0.0, 0.0625)  # all experts have room, and still none was hit
def test_ram_beneath_vram_is_predicted_from_what_vram_misses(
    vram: int, ram: int, vram_hits: float, ram_hits: float, miss_s: float
) -> None:
    of_ram = tier("ram", slots=ram, recent_hit_rate=ram_hits, miss_s=miss_s)
    found = forecast(sound(report(tier(slots=vram, recent_hit_rate=vram_hits), of_ram)), 1)
    assert found.hit_rate_at(ram) == pytest.approx(ram_hits, abs=1e-6)
    assert (np.diff(found.hit_rates) >= -1e-12).all()
    assert (np.diff(found.tokens_per_s) >= -1e-9).all()
    assert (found.lru_rates[found.slots <= vram] <= 1e-9).all()  # what VRAM holds, nobody asks RAM for
    assert found.tokens_per_s_at(ram) == pytest.approx(20.0, rel=1e-6)
    assert forecast(sound(report(tier(), tier("ram", miss_s=0.0))), 1).tokens_per_s_at(3000) is None
