"""Experts that are predicted while a model answers: they arrive, and the answer is the same."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import Prefetch
from engine.experts.prediction.mlp import Learning
from engine.experts.prediction.predictors import Ranked
from engine.experts.prediction.target import VramPrefetch
from tests.engine.on_devices import answer, chatting, opened
from tests.engine.tiny_families import tiny_checkpoint

PROMPT = [5, 17, 100, 33, 8]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    with opened(folder, 0) as model, chatting(model) as session:
        return answer(session, PROMPT, TOKENS).text


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(("devices", "ways"), [(1, None), (2, 2)])
@pytest.mark.parametrize("choice", ["auto", "previous", "gate", "correlation"])
def test_the_answer_is_the_same(folder: Path, expected: str, choice: Prefetch, devices: int, ways: int | None) -> None:
    slots = 20 if devices == 1 else 10
    with opened(folder, devices, prefetch=choice, cache_slots=slots, cache_ways=ways) as model:
        with chatting(model) as session:
            assert answer(session, PROMPT, TOKENS).text == expected
        prefetcher = model.foresight.prefetcher
        report = prefetcher.report()
    assert report.steps >= TOKENS - 2
    assert report.used + report.wasted <= report.prefetched
    names = [each.name for each in report.predictors]
    if choice == "auto":
        assert names == ["previous", "correlation", "gate"]
        return
    assert names == [choice]
    assert report.adopted == choice
    assert report.predictors[0].layers > 0
    if choice == "gate":
        assert report.prefetched > 0
        assert report.used > 0


@pytest.fixture(scope="module")
def zero_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model whose router chooses zero experts, too, and what it answers."""
    path = tiny_checkpoint("longcat_flash", tmp_path_factory.mktemp("longcat_flash"))
    with opened(path, 0) as model, chatting(model) as session:
        return path, answer(session, PROMPT, TOKENS).text


class Anything:
    """Stands for a network that has learnt nothing: every expert of the widest layer, and some that no layer has."""

    name = "mlp"
    learns = False
    beside_s = 0.0

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        pass

    def predict(self, layer: int) -> Ranked:
        return [(expert, 0.9) for expert in reversed(range(20))]

    def close(self) -> None:
        pass


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("choice", ["auto", "previous", "gate", "correlation", "mlp"])
def test_only_experts_that_have_records_are_predicted(
    zero_experts: tuple[Path, str], choice: Prefetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = zero_experts
    are_there: list[bool] = []
    prefetch = VramPrefetch.prefetch

    def prefetches(target: VramPrefetch, layer: int, experts: Iterable[int], *rest: Any) -> int:
        wanted, count = list(experts), target._layers[layer][0].source.num_experts
        are_there.extend(0 <= expert < count for expert in wanted)
        return prefetch(target, layer, wanted, *rest)

    monkeypatch.setattr(VramPrefetch, "prefetch", prefetches)
    monkeypatch.setattr(Learning, "load", lambda _learning: Anything())
    with opened(path, 1, prefetch=choice, cache_slots=4) as model, chatting(model) as session:
        assert answer(session, PROMPT, TOKENS).text == expected
    assert all(are_there)
    assert are_there or choice == "auto"
