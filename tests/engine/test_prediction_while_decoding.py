"""Experts that are predicted while a model answers: they arrive, and the answer is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.common.config import Prefetch
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


@pytest.mark.parametrize(("devices", "ways"), [(1, None), (2, 2)])
@pytest.mark.parametrize("choice", ["auto", "previous", "gate", "correlation"])
def test_the_answer_is_the_same(folder: Path, expected: str, choice: Prefetch, devices: int, ways: int | None) -> None:
    slots = 20 if devices == 1 else 10
    with opened(folder, devices, prefetch=choice, cache_slots=slots, cache_ways=ways) as model:
        with chatting(model) as session:
            assert answer(session, PROMPT, TOKENS).text == expected
        assert model.foresight is not None
        prefetcher = model.foresight.prefetcher
        assert prefetcher is not None
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
