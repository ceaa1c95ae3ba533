"""The engine's orders of a sweep, simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.simulator.sweeps import ORDERS, SweepParts, predicted_seconds

SECONDS = st.floats(0.0001, 0.01)
PARTS = st.builds(
    SweepParts,
    layers=st.integers(2, 8),
    count=st.integers(1, 6),
    before_s=SECONDS,
    between_s=SECONDS,
    after_s=SECONDS,
    attention_s=SECONDS,
    card_attention_s=SECONDS,
    cache_s=SECONDS,
    experts_s=SECONDS,
    together_s=SECONDS,
    weights_s=st.floats(0.001, 0.1),
    wanted=st.floats(0.5, 1.0),
    hot=st.floats(0.0, 0.5),
    outside_s=SECONDS,
)


def _seconds(schedule: str, parts: SweepParts, sweeps: int = 4) -> float:
    found = predicted_seconds(schedule, [parts] * sweeps)
    assert found is not None
    return found


@given(PARTS, st.sampled_from(sorted(ORDERS)))
def test_no_schedule_is_faster_than_its_busiest_part(parts: SweepParts, schedule: str) -> None:
    taken, layers = _seconds(schedule, parts), 4 * parts.layers
    computing = parts.before_s + parts.between_s + parts.after_s
    together = schedule == "klotski"
    experts = parts.together_s if together else parts.count * parts.experts_s
    assert taken >= layers * (parts.count * computing + experts) * 0.999
    moved = max(parts.wanted, parts.hot) if schedule in ("klotski", "hot-only") else 1.0
    # The last sweep's successor is not waited for.
    assert taken >= (layers - 1) * parts.weights_s * moved * 0.999


@given(PARTS)
def test_cgopipe_is_never_slower_than_one_micro_batch_after_the_other(parts: SweepParts) -> None:
    assert _seconds("cgopipe", parts) <= _seconds("s3", parts) * 1.001


def test_a_slow_link_is_all_that_counts_for_cgopipe() -> None:
    part = dict.fromkeys(("before_s", "between_s", "after_s", "experts_s", "together_s", "outside_s"), 1e-6)
    parts = SweepParts(
        10, 4, attention_s=1e-6, card_attention_s=1e-6, cache_s=1e-3, weights_s=0.05, wanted=1, hot=0, **part
    )
    sweeps = 50
    assert _seconds("cgopipe", parts, sweeps) == pytest.approx(sweeps * 10 * 0.05, rel=0.01)
    # S4 sends keys and values over the same link.
    assert _seconds("s4", parts, sweeps) == pytest.approx(sweeps * 10 * (0.05 + 4 * 1e-3), rel=0.01)
    # Klotski leaves out what nobody wants.
    assert _seconds("klotski", replace(parts, wanted=0.6), sweeps) == pytest.approx(sweeps * 10 * 0.03, rel=0.02)


def test_what_is_not_simulated_is_not_predicted() -> None:
    assert predicted_seconds("hybrid", []) is None
