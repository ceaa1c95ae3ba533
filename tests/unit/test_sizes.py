"""Sizes for people: figures in a sentence never contradict what was compared."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.sizes import about, rounded_down, rounded_up
from engine.verbs.options import parse_size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *((0, "0 bytes"), (3, "3 bytes"), (1500, "2 kB"), (1_230_000, "1.2 MB"), (85_000_000, "85 MB")),
        *((999_600_000, "1.0 GB"), (12_340_000_000, "12.3 GB")),
    ],
)
def test_the_nearest_figure(nbytes: int, text: str) -> None:
    assert about(nbytes) == text


@given(st.integers(0, 2**44))
def test_what_there_is_is_never_overstated_and_what_is_needed_never_understated(nbytes: int) -> None:
    assert _bytes(rounded_down(nbytes)) <= nbytes <= _bytes(rounded_up(nbytes))


@given(st.integers(1, 2**44), st.integers(1, 2**30))
def test_too_little_is_always_told_from_what_is_needed(less: int, missing: int) -> None:
    assert _bytes(rounded_down(less)) < _bytes(rounded_up(less + missing))


def _bytes(text: str) -> int:
    return int(text.removesuffix(" bytes")) if text.endswith("bytes") else parse_size(text.replace(",", ""))
