"""`simulate rivals`: every result has a source, the order is right, the same is predicted again, little was fitted."""

import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.planner.rivals import (
    FACTORS,
    ComparedSpeed,
    all_speeds,
    document,
    expected_hits,
    median_error,
    new_experts,
    orders,
)

_PROGRAMS = {"llama.cpp", "FreeToken", "Strata", "KTransformers", "BigMoeOnEdge", "colibri"}


@pytest.fixture(scope="module")
def speeds() -> list[ComparedSpeed]:
    return all_speeds()


def test_every_result_has_a_source(speeds: list[ComparedSpeed]) -> None:
    names = [(each.published.program, each.published.group, each.published.result) for each in speeds]
    sources = [each.published.source for each in speeds]
    assert len(set(zip(names, sources, strict=True))) == len(speeds)
    for each in speeds:
        assert re.match(r"https://\S+", each.published.source)
        assert each.published.by in ("author", "a user", "KTransformers' authors")
        assert each.published.machine.source
        assert math.isfinite(each.tokens_per_s)
        assert each.tokens_per_s > 0
        assert 0 <= each.hit_rate <= 1
        assert 0.5 <= each.published.model.expert_bits <= each.published.model.other_bits <= 32
        method = each.published.method
        assert (method.way, method.policy) in itertools.product(
            ("cpu", "fetch", "mixed", "processor"), ("lru", "static")
        )
        assert 0 <= method.disk_share <= 1 >= method.accepted > 0


def test_there_are_enough_of_each_program(speeds: list[ComparedSpeed]) -> None:
    counts = Counter(each.published.program for each in speeds)
    assert set(counts) == _PROGRAMS
    assert min(counts.values()) >= 5
    assert len(speeds) >= 20


def test_half_of_the_predictions_are_within_a_fifth_and_the_order_is_right(speeds: list[ComparedSpeed]) -> None:
    assert median_error(speeds) <= 0.2
    assert median_error([each for each in speeds if not each.fitted]) <= 0.25
    found = orders(speeds)
    assert sum(each.right for each in found) >= 0.95 * sum(each.pairs for each in found)
    assert all(each.correlation >= 0.6 for each in found)


def test_little_was_fitted(speeds: list[ComparedSpeed]) -> None:
    assert len(FACTORS) <= 4
    assert abs(2 * sum(each.fitted for each in speeds) - len(speeds)) <= 1


def test_predictions_are_the_same_again(speeds: list[ComparedSpeed]) -> None:
    expected_hits.cache_clear()
    new_experts.cache_clear()
    assert document(all_speeds()) == document(speeds)


def test_a_larger_cache_hits_more_and_favourites_are_about_as_good_as_the_latest() -> None:
    for policy in ("lru", "static"):
        hits = [expected_hits(128, 8, share, policy) for share in (0.0, 0.1, 0.3, 0.6, 1.0)]
        assert hits == sorted(hits)
        assert hits[0] == 0
    assert expected_hits(128, 8, 1.0, "static") == 1
    assert 0 < new_experts(128, 8) < 1


def test_the_page_has_these_numbers(speeds: list[ComparedSpeed]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "step-time.md").read_text(encoding="utf-8")
    content: Any = document(speeds)
    error = content["median_error"]
    assert f"| **all** | {len(speeds)} | {error['all']:.0%} | |" in page
    assert f"chosen with | {sum(each.fitted for each in speeds)} | {error['fitted']:.0%} | |" in page
    assert f"the other half | {sum(not each.fitted for each in speeds)} | {error['others']:.0%} | |" in page
    assert f"{content['pairs_right']} of {content['pairs']} pairs" in page
    for program in _PROGRAMS:
        of_program = [each for each in speeds if each.published.program == program]
        ratios = [each.ratio for each in of_program]
        row = f"{len(of_program)} | {median_error(of_program):.0%} | {min(ratios):.2f} to {max(ratios):.2f} |"
        assert f"| {program} | {row}" in page
