"""What is learnt of routing, in a session and over sessions: kept, faded, and nothing claimed that cannot be known."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common.config import EngineConfig
from engine.experts.prediction.mlp import RecordedRoutes
from engine.experts.prediction.predictors import Correlation, NextGate, Predictor, Ranked
from engine.experts.replay import RoutingTrace
from engine.runtime.load import foresight as popularity
from engine.runtime.load.foresight import Popularity, UseCounts, load_popularity, popularity_file, save_popularity
from tests.engine.loaded_tiny import open_model
from tests.engine.slots_in_time import PlantedRoutes
from tests.engine.tiny_families import tiny_checkpoint

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
    assert trace.experts.tolist() == [[[step, layer] for layer in range(3)] for step in range(2, 6)]
    assert (trace.num_experts, trace.sequence_starts.tolist(), routes.steps) == (9, [0, 4], 6)


EXPERTS_OF_POPULARITY = [4, 3]


@given(st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 2), min_size=1)), max_size=60))
def test_every_use_counts_once_and_is_passed_on(steps: list[tuple[int, set[int]]]) -> None:
    heard: list[tuple[int, list[int]]] = []

    class Listener:
        def observe(self, layer: int, experts: object, _hidden: torch.Tensor | None) -> None:
            heard.append((layer, list(experts)))  # type: ignore[call-overload]

    uses = UseCounts(EXPERTS_OF_POPULARITY, Listener())
    for layer, experts in steps:
        uses.observe(layer, sorted(experts), None)
    assert heard == [(layer, sorted(experts)) for layer, experts in steps]
    added = uses.added_to(Popularity([[2.0] * 4, [2.0] * 3]))
    if added is not None:
        for layer in range(2):
            for expert in range(EXPERTS_OF_POPULARITY[layer]):
                assert added.counts[layer][expert] == 1 + sum(at == layer and expert in used for at, used in steps)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"version": 9, "counts": []}', '{"version": 1, "counts": [[1, 2, 3, -4], [1, 2, 3]]}']
)
def test_a_file_that_cannot_be_understood_is_as_none(content: str) -> None:
    assert load_popularity("m", EXPERTS_OF_POPULARITY) is None
    save_popularity("m", Popularity([[1.0] * 4, [2.0] * 3]))
    known = load_popularity("m", EXPERTS_OF_POPULARITY)
    assert known.counts == [[1.0] * 4, [2.0] * 3]
    assert load_popularity("m", [4, 4]) is None
    popularity_file("m").write_text(content)
    assert load_popularity("m", EXPERTS_OF_POPULARITY) is None


def test_a_layer_that_was_seen_less_often_loses_no_places() -> None:
    """Of a prompt the last layer computes one row."""
    known = Popularity([[10.0, 20.0, 30.0, 40.0], [3.0, 4.0, 3.0]])
    assert [*known.ranked()] == [(0, 3), (1, 1), (0, 2), (1, 0), (1, 2), (0, 1), (0, 0)]
    assert known.part([1], [range(1, 3)]).of([0]) == {0: 0.4, 1: 0.3}


def test_a_full_disk_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    save_popularity("m", Popularity([[1.0]]))
    assert list(popularity_file("m").parent.iterdir()) == []


def test_the_most_used_experts_are_there_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path / "mixtral")
    config = EngineConfig(str(folder), device="emulated:slow-link", precision="fp32", cache_slots=3, prefetch="off")

    def load() -> object:
        return open_model(config)

    monkeypatch.setattr(popularity, "_WORTH_KEEPING", 1)
    model = load()
    with torch.inference_mode():
        for token in range(3, 9):
            model.model(input_ids=torch.tensor([[token]]))  # type: ignore[attr-defined]
    counts = model.foresight._uses[1]._counts  # type: ignore[attr-defined]
    model.close()  # type: ignore[attr-defined]
    again = load()
    (cache,) = again.devices.experts.caches[0]  # type: ignore[attr-defined]
    cache.wait()
    there = sorted(counts[layer][expert] for layer in range(len(counts)) for expert in cache.residents(layer))
    everyone = sorted(count for layer in counts for count in layer)
    assert there == everyone[-cache.slots :]
    again.close()  # type: ignore[attr-defined]


def test_correlation_does_not_overflow() -> None:
    predictor = Correlation(2, 4, 2, half_life=0.1)
    for _ in range(50):
        predictor.observe(0, [1], None)
        predictor.observe(1, [2], None)
    predictor.observe(0, [1], None)
    assert predictor.predict(1)[0][0] == 2
    assert np.isfinite(predictor.predict(1)[0][1])
