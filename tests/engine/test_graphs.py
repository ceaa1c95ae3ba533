"""Decode steps repeated as graphs, on an emulated card: tokens are those of transformers, and who cannot is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.devices.graphs import CaptureError
from engine.devices.memory_budget import MemoryCategory
from engine.devices.recorded_graphs import RecordedCapture
from engine.runtime.chat_session import ChatSession
from engine.runtime.graphs import GraphedSteps
from engine.runtime.kv_session import KvSession
from tests.engine.graph_cases import FAMILIES, check_conversation, graphs_of
from tests.engine.loaded_tiny import random_prompt
from tests.engine.on_devices import PROMPT, answer, chatting, memory_use, opened, reference, share_misses


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    reference.cache_clear()


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share_misses(monkeypatch)


CONFIGS: list[dict[str, Any]] = [{}, {"cache_slots": 4}, {"cache_slots": 4, "misses": "fetch"}]


@pytest.mark.parametrize(
    ("family", "config"), [(family, CONFIGS[number % 3]) for number, family in enumerate(FAMILIES)], ids=str
)
def test_tokens_are_those_of_transformers(family: str, config: dict[str, Any], checkpoints: Path) -> None:
    check_conversation(family, checkpoints, graphs="on", **config)


@pytest.mark.parametrize("family", ["llama4_text", "nemotron_h"])
def test_families_that_cannot_are_left_alone_and_it_is_said_once(
    family: str, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reference(family, checkpoints)
    with caplog.at_level("INFO"), opened(expected.folder, graphs="on") as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert list(answer(session, expected.second_prompt).token_ids) == expected.second
        graphs = graphs_of(session)
        assert graphs.refused is not None
        assert graphs.counters.captures == graphs.counters.replays == 0
    assert sum("not captured as graphs" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_long_answers_grow_out_of_their_rows_and_windows(
    family: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.fixed_cache.ROWS_STEP", 64)
    folder = reference(family, checkpoints).folder
    prompt = random_prompt(20, seed=4)
    with opened(folder, cache_slots=4) as model, chatting(model) as session:
        wanted = answer(session, prompt, 150).token_ids
    with opened(folder, cache_slots=4, graphs="on") as model, chatting(model) as session:
        assert answer(session, prompt, 150).token_ids == wanted
        counters = graphs_of(session).counters
        assert counters.eager == 0
        assert counters.replays > 140
        assert counters.captures == counters.warm_ups == (1 if family == "mixtral" else 3)


def test_without_experts_that_wait_a_step_is_one_graph(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, graphs="on") as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        step = graphs_of(session)._step
        assert step is not None
        layers = model.model.config.num_hidden_layers
        assert step.pieces == layers + 1
