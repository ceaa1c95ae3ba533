"""What the default run tries of tests' combinations of parameters."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.combinations import few_of_product, pairwise, some

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def product(sizes: list[int]) -> list[dict[str, int]]:
    return [dict(zip("abcd", places, strict=False)) for places in itertools.product(*map(range, sizes))]


@given(SIZES, st.integers(0, 10**6))
def test_each_value_of_a_product_is_tried_and_the_longest_two_lists_with_each_other(sizes: list[int], day: int) -> None:
    combinations = product(sizes)
    few = [one for one, is_tried in zip(combinations, few_of_product(combinations, day), strict=True) if is_tried]
    longest = sorted(sizes)[-2:] if len(sizes) > 2 else [max(sizes)]
    assert len(few) == longest[0] * (longest[1] if len(longest) > 1 else 1)
    for name, size in zip("abcd", sizes, strict=False):
        assert {one[name] for one in few} == set(range(size))


def test_parameters_of_one_list_are_one_and_every_combination_has_its_day() -> None:
    combinations = [{**one, "with_a": one["a"]} for one in product([3, 2])]
    assert sum(few_of_product(combinations, 0)) == 3
    assert all(any(days) for days in zip(*(few_of_product(combinations, day) for day in range(6)), strict=True))


@given(SIZES)
def test_any_two_values_meet(sizes: list[int]) -> None:
    values = {name: range(size) for name, size in zip("abcd", sizes, strict=False)}
    chosen = pairwise(values)
    for (a, of_a), (b, of_b) in itertools.combinations(values.items(), 2):
        assert {(one[a], one[b]) for one in chosen} == set(itertools.product(of_a, of_b))


@pytest.mark.parametrize(("day", "tried"), [(0, "acd"), (1, "bce"), (2, "cf"), (3, "acd")])
def test_every_third_and_those_named_are_tried(monkeypatch: pytest.MonkeyPatch, day: int, tried: str) -> None:
    monkeypatch.setattr("tests.combinations.DAY", day)
    assert "".join(one.values[0] for one in some("abcdef", ["c"]) if not one.marks) == tried
