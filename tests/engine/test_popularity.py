"""What earlier sessions say about a model's experts: kept, faded, and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common.config import EngineConfig
from engine.runtime.load import foresight as popularity
from engine.runtime.load.foresight import Popularity, UseCounts, load_popularity, popularity_file, save_popularity
from engine.runtime.load.model import load_model
from tests.engine.tiny_families import tiny_checkpoint

EXPERTS = [4, 3]


@given(st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 2), min_size=1)), max_size=60))
def test_every_use_counts_once_and_is_passed_on(steps: list[tuple[int, set[int]]]) -> None:
    heard: list[tuple[int, list[int]]] = []

    class Listener:
        def observe(self, layer: int, experts: object, _hidden: torch.Tensor | None) -> None:
            heard.append((layer, list(experts)))  # type: ignore[call-overload]

    uses = UseCounts(EXPERTS, Listener())
    for layer, experts in steps:
        uses.observe(layer, sorted(experts), None)
    assert heard == [(layer, sorted(experts)) for layer, experts in steps]
    added = uses.added_to(Popularity([[2.0] * 4, [2.0] * 3]))
    if added is not None:
        for layer in range(2):
            for expert in range(EXPERTS[layer]):
                assert added.counts[layer][expert] == 1 + sum(at == layer and expert in used for at, used in steps)


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"version": 9, "counts": []}', '{"version": 1, "counts": [[1, 2, 3, -4], [1, 2, 3]]}']
)
def test_a_file_that_cannot_be_understood_is_as_none(content: str) -> None:
    assert load_popularity("m", EXPERTS) is None
    save_popularity("m", Popularity([[1.0] * 4, [2.0] * 3]))
    known = load_popularity("m", EXPERTS)
    assert known is not None
    assert known.counts == [[1.0] * 4, [2.0] * 3]
    assert load_popularity("m", [4, 4]) is None
    popularity_file("m").write_text(content)
    assert load_popularity("m", EXPERTS) is None


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
        return load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)

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
