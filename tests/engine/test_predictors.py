"""What is planted in made-up routing is learnt, and nothing is claimed to be known that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.prediction.learning import RecordedRoutes
from engine.experts.prediction.predictors import Correlation, NextGate, Predictor, Ranked
from engine.experts.replay import RoutingTrace
from tests.engine.slots_in_time import PlantedRoutes

LAYERS, EXPERTS, WIDTH = 5, 24, 3


def recall(predictor: Predictor, routes: PlantedRoutes, ahead: int = 1, steps: int = 400, judged: int = 100) -> float:
    """Of the last steps' experts, the share that was among the first WIDTH predicted."""
    found = wanted = 0
    for number in range(steps):
        step = routes.step()
        said: Ranked = ()
        for layer, experts in enumerate(step):
            predictor.observe(layer, experts, None)
            coming = layer + ahead
            if coming < LAYERS:
                said = predictor.predict(coming)
                check(said)
                if number >= steps - judged:
                    found += len({expert for expert, _ in said[:WIDTH]} & set(step[coming]))
                    wanted += WIDTH
    return found / wanted


def check(said: Ranked) -> None:
    experts = [expert for expert, _ in said]
    probabilities = [probability for _, probability in said]
    assert len(set(experts)) == len(experts)
    assert all(0 <= expert < EXPERTS for expert in experts)
    assert all(0 <= probability <= 1 + 1e-6 for probability in probabilities)
    assert probabilities == sorted(probabilities, reverse=True)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_correlation_learns_who_follows_whom(ahead: int) -> None:
    routes = PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=0.95)
    assert recall(Correlation(LAYERS, EXPERTS, 2 * WIDTH), routes, ahead) > 0.95**ahead - 0.1


def test_correlation_starts_from_a_trace() -> None:
    routes = PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=1.0)
    chosen = np.array([routes.step() for _ in range(100)], np.int16)
    chosen[3, 2] = -1  # a layer that did not run
    trace = RoutingTrace(chosen, np.zeros(chosen.shape, np.float16), np.array([0, 100]), EXPERTS)
    assert recall(Correlation(LAYERS, EXPERTS, 6, trace=trace), routes, steps=20, judged=20) > 0.95


def test_correlation_takes_steps_of_any_width_and_length() -> None:
    predictor = Correlation(3, 6, 3)
    for _ in range(30):
        predictor.observe(0, [1, 4], None)
        predictor.observe(1, [0, 2, 5], None)
        predictor.observe(0, [1, 4], None)  # the one before was cut short
        predictor.observe(1, [0, 2, 5], None)
        predictor.observe(2, [3], None)
    predictor.observe(0, [1], None)
    assert {expert for expert, _ in predictor.predict(1)} == {0, 2, 5}
    assert predictor.predict(0) == []


def router(weight: torch.Tensor, width: int) -> Callable[[torch.Tensor], Any]:
    def gate(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = hidden @ weight.T
        return logits, logits.topk(width).indices

    return gate


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 12), st.integers(1, 8))
def test_gate_predicts_what_the_router_would_choose(seed: int, tokens: int, limit: int, experts: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, 16, generator=dice)
    width = min(2, experts, limit)
    predictor = NextGate([None, router(weight, width), None], limit)
    hidden = torch.randn(tokens, 16, generator=dice)
    predictor.observe(0, [1], hidden)
    said = predictor.predict(1)
    check(said)
    chosen = set((hidden @ weight.T).topk(width).indices.flatten().tolist())
    assert len(said) <= tokens * limit
    predicted = [expert for expert, _ in said]
    assert set(predicted[: len(chosen)]) == chosen


def test_routes_are_those_of_the_last_whole_steps() -> None:
    routes = RecordedRoutes(layers=3, experts=9, per_token=2, capacity=4)
    assert routes.trace() is None
    for step in range(6):
        for layer in range(3):
            routes.note(layer, [step, layer])
    routes.note(0, [8, 8])
    routes.note(1, [8, 8])  # cut short
    routes.note(0, [1, 2, 3])  # several tokens
    routes.note(1, [7, 7])
    routes.note(2, [7, 7])
    routes.note(1, [7, 7])
    trace = routes.trace()
    assert trace is not None
    assert trace.experts.tolist() == [[[step, layer] for layer in range(3)] for step in range(2, 6)]
    assert (trace.num_experts, trace.sequence_starts.tolist(), routes.steps) == (9, [0, 4], 6)
