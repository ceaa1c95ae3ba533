"""Counts of experts against plain ones, and the curve against the replay of the whole."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.replay import RoutingTrace, hit_ratio_curve, stack_distances
from engine.runtime.telemetry.experts import ExpertUses

LAYERS, WIDTHS = (1, 2, 5), (4, 4, 3)
USE = st.tuples(
    st.integers(0, 20),
    st.sampled_from([*LAYERS, -1, 3, 99]),
    st.lists(st.integers(-1, 5), max_size=4, unique=True),
)


@given(st.lists(st.lists(USE, max_size=6), max_size=5))
def test_every_use_is_counted_once(batches: list[list[tuple[int, int, list[int]]]]) -> None:
    uses = ExpertUses(LAYERS, WIDTHS)
    expected = np.zeros((3, 4), int)
    last = np.zeros((3, 4), int)
    for batch in batches:
        for step, layer, experts in batch:
            uses.entries.append((step, layer, experts, tuple(experts[:1])))
            for expert in experts:
                if layer in LAYERS and 0 <= expert < 4:
                    place = LAYERS.index(layer), expert
                    expected[place] += 1
                    last[place] = max(last[place], step + 1)
        uses.settle()
    np.testing.assert_array_equal(uses.uses, expected)
    np.testing.assert_array_equal(uses.last_step, last)
    assert (uses.hits <= uses.uses).all()
    assert (uses.heat <= uses.uses).all()


def test_layers_counted_together_count_as_those_counted_alone() -> None:
    alone, together = ExpertUses(LAYERS, WIDTHS), ExpertUses(LAYERS, WIDTHS)
    entries = [(0, 1, [0, 3]), (0, 2, [1, 9]), (1, 5, [2]), (1, 3, [0])]
    alone.entries.extend((*entry, ()) for entry in entries)
    steps, layers = (np.array([entry[place] for entry in entries]) for place in (0, 1))
    experts = np.array([expert for entry in entries for expert in entry[2]])
    together.entries.append((steps, layers, experts, np.array([len(entry[2]) for entry in entries]), None))
    for uses in (alone, together):
        uses.settle()
    np.testing.assert_array_equal(alone.uses, together.uses)
    np.testing.assert_array_equal(alone.last_step, together.last_step)


def test_the_curve_of_few_layers_is_that_of_a_replay() -> None:
    rng = np.random.default_rng(1)
    routing = np.stack([[rng.choice(8, 3, replace=False) for _ in range(3)] for _ in range(100)]).astype(np.int16)
    uses = ExpertUses((0, 1, 2), (8, 8, 8))
    for step, layers in enumerate(routing):
        for layer, experts in enumerate(layers):
            uses.entries.append((step, layer, experts.tolist(), ()))
    uses.settle()
    slots, rates = uses.curve()
    trace = RoutingTrace(routing, np.zeros(routing.shape, np.float16), np.array([0, 100]), 8)
    expected = hit_ratio_curve(stack_distances(trace, per_layer=False))
    np.testing.assert_allclose(rates, expected[slots])
    assert slots[-1] == 24


def test_there_is_no_curve_before_enough_was_seen() -> None:
    uses = ExpertUses((0,), (4,))
    uses.entries.append((0, 0, [1], ()))
    uses.settle()
    assert len(uses.curve()[0]) == 0
    assert len(ExpertUses((), ()).curve()[0]) == 0
