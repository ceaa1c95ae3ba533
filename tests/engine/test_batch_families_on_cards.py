"""Families that attend or compute in ways of their own, on an emulated card: answers are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.common.config import SamplingParams
from engine.planner.schedules import CGOPIPE, KLOTSKI, S4
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.alone import Alone
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from tests.engine import on_devices
from tests.engine.loaded_tiny import NO_END, random_prompt
from tests.engine.tiny_families import tiny_checkpoint

LENGTHS = [1, 40, 70, 12, 33]


def _rows() -> list[BatchRequest]:
    return [
        BatchRequest(row, ids=tuple(random_prompt(n, seed=row)), sampling=SamplingParams(max_tokens=5), end_ids=NO_END)
        for row, n in enumerate(LENGTHS)
    ]


def _alone(loaded: LoadedModel) -> dict[int, tuple[int, ...]]:
    chat = Alone(loaded)
    found = {row.row: chat.generate_from_ids(row.ids, row.sampling, end_ids=NO_END).token_ids for row in _rows()}
    chat.clear()
    return found


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",  # sinks, windows in every other layer, biases
        "qwen2_moe",  # a shared expert behind a gate
        "deepseek_v3",  # latent keys and values, a dense first layer, shared experts
        "glm4_moe",  # sigmoid router
        "mixtral",  # a window in every layer
    ],
)
def test_answers_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    with on_devices.opened(folder, 0) as loaded:
        wanted = _alone(loaded)
    with on_devices.opened(folder, 1, cache_slots=3) as loaded:
        for schedule in (CGOPIPE, S4, KLOTSKI, None):
            answers: dict[int, tuple[int, ...]] = {}
            policy = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=100, micro_batch_rows=2, schedule=schedule)
            executor = BatchExecutor(loaded, policy)
            assert not executor.note
            try:
                executor.run(iter(_rows()), lambda answer, to=answers: to.__setitem__(answer.row, answer.token_ids))  # type: ignore[misc]
            finally:
                executor.close()
            assert answers == wanted, schedule
