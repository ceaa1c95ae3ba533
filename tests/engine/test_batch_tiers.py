"""Batches of models with experts on emulated cards or on disk: the same answers, each expert brought once a sweep."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import SamplingParams
from engine.experts.executor import ExpertExecutor
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from tests.engine import on_devices
from tests.engine.loaded_tiny import NO_END, random_prompt
from tests.engine.single_streams import Alone
from tests.engine.test_disk_backed import on_disk
from tests.engine.tiny_families import tiny_checkpoint

POLICY = BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=200)


def _rows(lengths: list[int], tokens: int = 6) -> list[BatchRequest]:
    return [
        BatchRequest(
            row, ids=tuple(random_prompt(n, seed=row)), sampling=SamplingParams(max_tokens=tokens), end_ids=NO_END
        )
        for row, n in enumerate(lengths)
    ]


def _answers(loaded: LoadedModel, rows: list[BatchRequest]) -> dict[int, tuple[int, ...]]:
    answers: dict[int, tuple[int, ...]] = {}
    executor = BatchExecutor(loaded, POLICY)
    assert not executor.note
    executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, answer.token_ids))
    executor.close()
    return answers


def _alone(loaded: LoadedModel, rows: list[BatchRequest]) -> dict[int, tuple[int, ...]]:
    chat = Alone(loaded)
    found = {row.row: chat.generate_from_ids(row.ids, row.sampling, end_ids=NO_END).token_ids for row in rows}
    chat.clear()
    return found


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("config", [{"cache_slots": 3}, {"cache_slots": 0}, {"misses": "layer"}, {}])
def test_experts_on_cards_answer_as_in_a_chat(devices: int, config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path)
    rows = _rows([1, 40, 90, 12, 33])
    with on_devices.opened(folder, devices, **config) as loaded:
        assert _answers(loaded, rows) == _alone(loaded, rows)


def test_experts_on_disk_are_read_once_a_sweep_and_answer_as_in_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path / "mixtral", num_hidden_layers=3)
    rows = _rows([20] * 8, tokens=4)
    with on_disk(monkeypatch, folder, "fp32") as loaded:
        wanted = _alone(loaded, rows)
        calls: list[int] = []
        compute = ExpertExecutor.__call__

        def counted(tier: ExpertExecutor, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
            calls.append(len(hidden))
            return compute(tier, hidden, *routing)

        monkeypatch.setattr(ExpertExecutor, "__call__", counted)
        assert _answers(loaded, rows) == wanted
        # A sweep reads all prompts, and three more take a token each; to see what attends no experts are read.
        assert calls == [160] * 3 + [8] * 9
