"""Batches of models with experts on emulated cards or on disk: the same answers, each expert brought once a sweep."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.experts.executor import ExpertExecutor
from engine.runtime.batch.policy import BatchPolicy
from tests.engine import on_devices
from tests.engine.single_streams import answers_alone, answers_of, rows_of
from tests.engine.test_disk_backed import on_disk
from tests.engine.tiny_families import tiny_checkpoint

POLICY = BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=200)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("config", [{"cache_slots": 3}, {"cache_slots": 0}, {"misses": "layer"}, {}])
def test_experts_on_cards_answer_as_in_a_chat(devices: int, config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path)
    rows = rows_of([1, 40, 90, 12, 33], 6)
    with on_devices.opened(folder, devices, **config) as loaded:
        assert answers_of(loaded, rows, POLICY) == answers_alone(loaded, rows)


def test_experts_on_disk_are_read_once_a_sweep_and_answer_as_in_a_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path / "mixtral", num_hidden_layers=3)
    rows = rows_of([20] * 8, 4)
    with on_disk(monkeypatch, folder, "fp32") as loaded:
        wanted = answers_alone(loaded, rows)
        calls: list[int] = []
        compute = ExpertExecutor.__call__

        def counted(tier: ExpertExecutor, hidden: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
            calls.append(len(hidden))
            return compute(tier, hidden, *routing)

        monkeypatch.setattr(ExpertExecutor, "__call__", counted)
        assert answers_of(loaded, rows, POLICY) == wanted
        # A sweep reads all prompts, and three more take a token each; to see what attends no experts are read.
        assert calls == [160] * 3 + [8] * 9
