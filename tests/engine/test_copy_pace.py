"""Copies of misses are started as often as hits pay for them."""

from __future__ import annotations

import random

import pytest

from engine.experts.path_choice import CopyPace


def _ran(hit_s: float, copy_s: float, tokens: int = 2000, base_s: float = 3e-3) -> tuple[CopyPace, float]:
    """After tokens that took what these prices say, and the copies of each of the last ones."""
    drawn = random.Random(1)
    pace, started, late = CopyPace(1e-4, 1e-4), 0, 0
    for token in range(tokens):
        missed = drawn.randrange(8, 24)
        noise = drawn.gauss(0, 2e-4) + (0.05 if drawn.random() < 0.01 else 0.0)
        pace.observe(base_s + hit_s * missed + copy_s * started + noise, missed, started)
        started = pace.due(32 - missed, 8)
        pace.started(started)
        late += started if token >= tokens // 2 else 0
    return pace, late / (tokens // 2)


def test_prices_are_found_in_the_tokens() -> None:
    pace, copies = _ran(1e-4, 4e-4)
    assert pace.hit_s == pytest.approx(1e-4, rel=0.3)
    assert pace.copy_s == pytest.approx(4e-4, rel=0.3)
    assert 1 < copies < 4


def test_hits_that_gain_nothing_pay_for_hardly_any_copies() -> None:
    _, copies = _ran(0.0, 5e-4)
    assert 0 < copies < 0.5


def test_copies_that_cost_nothing_are_as_many_as_there_may_be() -> None:
    _, copies = _ran(1e-4, 0.0)
    assert copies > 7
