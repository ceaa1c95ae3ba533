"""Combinations of parameters: few that bring any two values together by default, the others with `-m exhaustive`."""

import itertools
import os
import random
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

DAY = int(os.environ.get("SWITCHYARD_TEST_DAY", "0"))
"""Values that take turns do so by this: always 0 in CI, elsewhere another one each day."""


def pairwise(values: Mapping[str, Sequence[Any]], seed: int = 1) -> list[dict[str, Any]]:
    """Combinations such that any two values of different names meet in one of them; not many, always the same."""
    rng = random.Random(seed)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(values, 2) for x in values[a] for y in values[b]}
    order = list(values)
    chosen = []
    while missing:
        pair = min(missing, key=repr)
        best: dict[str, Any] = {}
        covered: set[Any] = set()
        for _ in range(40):
            attempt = {name: rng.choice(list(values[name])) for name in order} | dict(pair)
            pairs = set(itertools.combinations([(name, attempt[name]) for name in order], 2)) & missing
            if len(pairs) > len(covered):
                best, covered = attempt, pairs
        chosen.append(best)
        missing -= covered
    return chosen


def any_two(values: Mapping[str, Sequence[Any]], indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrises a test with every combination of the values, all but a `pairwise` few marked as exhaustive."""
    places = {name: range(len(found)) for name, found in values.items()}
    few = {tuple(chosen.values()) for chosen in pairwise(places)} if len(values) > 1 else set()
    combinations = [
        pytest.param(
            *(found[place] for found, place in zip(values.values(), chosen, strict=True)),
            marks=[] if chosen in few else [pytest.mark.exhaustive],
        )
        for chosen in itertools.product(*places.values())
    ]
    return pytest.mark.parametrize(list(values), combinations, indirect=list(indirect), ids=_name)


def some(values: Iterable[Any], always: Collection[Any] = (), every: int = 6, first: int = 0) -> list[Any]:
    """Parameters of which those named and every sixth are tried by default, the others with `-m exhaustive`.

    Which of them are tried changes by day, but for CI.

    Args:
        first: tests of the same values begin with another one each, so that one of them tries each value.
    """
    values = list(values)
    every = min(every, len(values))
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if (number - first - DAY) % every == 0 or value in always else [pytest.mark.exhaustive],
        )
        for number, value in enumerate(values)
    ]


def mark_most_of_products(items: Iterable[pytest.Item]) -> None:
    """Where a test has several lists of parameters, its fixtures' among them, marks most combinations as exhaustive.

    Of what is left of a test with `takes_turns(n)` every nth is tried, which ones depends on its name and the day.

    `any_two` is for tests of which any two values matter, `every_combination` marks those of which all do, such as
    kernels that are code of their own for every type on every processor.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_default = item.get_closest_marker("exhaustive") is None
        if is_default and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for combinations in tests.values():
        few = combinations
        if combinations[0].get_closest_marker("every_combination") is None:
            columns = list(zip(*map(_values_by_list, combinations), strict=True))
            few = list(itertools.compress(combinations, few_of_product(columns)))
        if (turns := combinations[0].get_closest_marker("takes_turns")) is not None:
            every = min(turns.args[0], len(few))
            few = few[(zlib.crc32(combinations[0].originalname.encode()) + DAY) % every :: every]
        for combination in combinations:
            if combination not in few:
                combination.add_marker(pytest.mark.exhaustive)


def _values_by_list(test: pytest.Function) -> list[tuple[int, ...]]:
    """Of each list of parameters, by which of its values the test is called."""
    left = {name: id(value) for name, value in test.callspec.params.items()}
    found = []
    for mark in test.iter_markers("parametrize"):
        names = mark.kwargs.get("argnames", mark.args[0] if mark.args else "")
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        found.append(tuple(left.pop(name) for name in names if name in left))
    return found + [(value,) for value in left.values()]  # of fixtures


def few_of_product(columns: Sequence[Sequence[Any]], day: int = DAY) -> list[bool]:
    """Which combinations are tried by default, given of each list of parameters which value each combination has.

    Of two lists each value is tried, of more lists the longest two with each other.
    """
    lists = [[list(dict.fromkeys(column)).index(value) for value in column] for column in columns]
    longest, *others = sorted(lists, key=lambda places: -max(places))
    second = others.pop(0) if len(others) > 1 else [0] * len(longest)
    return [
        all(
            places[number] == (longest[number] + turn * (second[number] + day)) % (max(places) + 1)
            for turn, places in enumerate(others, 1)
        )
        for number in range(len(longest))
    ]


def _name(value: object) -> str | None:
    """Of an enumeration's value its name; pytest knows a name for the rest."""
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else None
