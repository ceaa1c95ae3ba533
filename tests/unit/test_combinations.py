"""What the default run tries of tests' combinations of parameters."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.combinations import few_of_product, mark_most_of_products, pairwise, some

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def product(sizes: list[int]) -> list[tuple[int, ...]]:
    """Of each list the value in each of all combinations."""
    return list(zip(*itertools.product(*map(range, sizes)), strict=True))


@given(SIZES, st.integers(0, 10**6))
def test_each_value_of_a_product_is_tried_and_the_longest_two_lists_with_each_other(sizes: list[int], day: int) -> None:
    columns = product(sizes)
    few = [
        values
        for values, is_tried in zip(zip(*columns, strict=True), few_of_product(columns, day), strict=True)
        if is_tried
    ]
    second, longest = sorted([1, *sizes])[-2:]
    assert len(few) == longest * (second if len(sizes) > 2 else 1)
    for place, size in enumerate(sizes):
        assert {values[place] for values in few} == set(range(size))


class Examples:
    """Stand for what pytest collects."""

    @pytest.fixture(params=[1, 2, 3])
    def third(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)

    @pytest.mark.parametrize(("first", "with_first"), [("a", 1), ("a", 2), ("b", 1)])
    @pytest.mark.parametrize("second", ["x", "y"])
    def test_product(self, first: str, with_first: int, second: str, third: int) -> None:
        pass

    @pytest.mark.takes_turns(4)
    @pytest.mark.parametrize("first", range(10))
    def test_in_turn(self, first: int) -> None:
        pass

    @pytest.mark.every_combination
    @pytest.mark.parametrize("first", [1, 2])
    @pytest.mark.parametrize("second", [1, 2])
    def test_all(self, first: int, second: int) -> None:
        pass


def few_of_examples(request: pytest.FixtureRequest) -> list[str]:
    tests = pytest.Class.from_parent(request.node.parent, name="Examples").collect()
    mark_most_of_products(tests)
    return [test.name for test in tests if test.get_closest_marker("exhaustive") is None]


def test_items_of_products_are_marked(request: pytest.FixtureRequest) -> None:
    few = few_of_examples(request)
    assert len([name for name in few if "product" in name]) == 3 * 3  # of three lists the longest two with each other
    assert len([name for name in few if "all" in name]) == 4


def test_each_combination_has_its_turn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    for day in range(4):
        monkeypatch.setattr("tests.combinations.DAY", day)
        seen += (name for name in few_of_examples(request) if "in_turn" in name)
    assert sorted(seen) == [f"test_in_turn[{number}]" for number in range(10)]


@given(SIZES)
def test_any_two_values_meet(sizes: list[int]) -> None:
    values = {name: range(size) for name, size in zip("abcd", sizes, strict=False)}
    chosen = pairwise(values)
    for (a, of_a), (b, of_b) in itertools.combinations(values.items(), 2):
        assert {(one[a], one[b]) for one in chosen} == set(itertools.product(of_a, of_b))


@pytest.mark.parametrize(("day", "tried"), [(0, "acd"), (1, "bce"), (2, "cf"), (3, "acd")])
def test_every_third_and_those_named_are_tried(monkeypatch: pytest.MonkeyPatch, day: int, tried: str) -> None:
    monkeypatch.setattr("tests.combinations.DAY", day)
    assert "".join(one.values[0] for one in some("abcdef", ["c"], every=3) if not one.marks) == tried
    assert len([one for one in some("ab") if not one.marks]) == 1  # however few there are
