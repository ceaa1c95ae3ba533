"""Requests that are longer than the pages that others share wait for a turn of their own, or keep their own cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.kernels.native.build import library_path
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.packed_sweep import PackedModel, Work
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.alone import Alone
from engine.runtime.schedule.asked import Outcome
from engine.runtime.schedule.lane import RowSource
from engine.runtime.schedule.request import BatchAnswer, BatchRequest, Preparation
from engine.runtime.schedule.scheduler import Scheduler
from engine.runtime.schedule.together import ContinuousBatch
from tests.engine.loaded_tiny import NO_END, random_prompt, tiny_loaded
from tests.engine.tiny_families import tiny_checkpoint

POLICY = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25, ahead=16)
PAGES = 4
"""Of 32 tokens."""


@pytest.fixture(scope="module")
def mixtral() -> LoadedModel:
    return tiny_loaded("mixtral")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A model whose keys and values move between its own cache and pages."""
    path: Path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("room") / "model")
    config = EngineConfig(str(path), device="cpu", precision="bf16", threads=1)
    model = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    yield model
    model.close()


SHAPES = pytest.mark.parametrize(
    ("first", "second"),
    [((40, 150), (20, 30)), ((40, 150), (20, 100)), ((20, 30), (150, 20)), ((20, 30), (120, 40)), ((60, 60), (60, 60))],
)
"""(tokens of the prompt, and of the answer) of two; the second one comes while the first is answered."""


def request(number: int, shape: tuple[int, int]) -> BatchRequest:
    ids = tuple(random_prompt(shape[0], seed=number))
    return BatchRequest(0, ids=ids, sampling=SamplingParams(max_tokens=shape[1]), end_ids=NO_END)


def answered(loaded: LoadedModel, first: tuple[int, int], second: tuple[int, int]) -> list[GenerationResult]:
    scheduler, ends, looks = Scheduler(loaded), dict[int, Outcome](), 0
    scheduler._together = ContinuousBatch(PackedModel(loaded, POLICY), POLICY, most_pages=PAGES)

    def ask(number: int, shape: tuple[int, int]) -> None:
        scheduler.submit(request(number, shape), lambda outcome: ends.__setitem__(number, outcome))

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        if looks == 5:
            ask(1, second)
        assert looks < 2000, "nobody gets on"
        return False

    ask(0, first)
    scheduler.serve(arrive)
    scheduler.close()
    found = [ends[number] for number in range(2)]
    for end in found:
        assert isinstance(end, GenerationResult), end
    return found  # type: ignore[return-value]


@SHAPES
def test_what_is_too_long_for_the_pages_is_answered_all_the_same(
    mixtral: LoadedModel, first: tuple[int, int], second: tuple[int, int]
) -> None:
    alone = Alone(mixtral)
    for number, end in enumerate(answered(mixtral, first, second)):
        asked = request(number, (first, second)[number])
        expected = alone.generate_from_ids(asked.ids, asked.sampling, end_ids=NO_END)
        assert (end.token_ids, end.finish_reason) == (expected.token_ids, expected.finish_reason)


@pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
@SHAPES
def test_what_could_not_stay_in_the_pages_does_not_move_there(
    quick: LoadedModel, first: tuple[int, int], second: tuple[int, int]
) -> None:
    for shape, end in zip((first, second), answered(quick, first, second), strict=True):
        assert (end.generated_tokens, end.finish_reason) == (shape[1], "length")


@pytest.mark.parametrize("how", ["many rows", "long prompts", "one request"])
def test_a_sweep_without_memory_is_tried_again_with_less(
    mixtral: LoadedModel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    own, hopeless = PackedModel.sweep, tuple(random_prompt(9, seed=3))

    def sweep(self: PackedModel, work: list[Work]) -> Any:
        most = max(each.tokens for each in work)
        is_hopeless = any(tuple(each.row.prompt[:9]) == hopeless for each in work)
        too_much = {"many rows": len(work) > 2, "long prompts": most > PAGE_TOKENS, "one request": is_hopeless}
        if too_much[how]:
            raise MemoryError
        return (yield from own(self, work))

    monkeypatch.setattr(PackedModel, "sweep", sweep)
    policy = replace(POLICY, sweep_tokens=100)
    scheduler, ends = Scheduler(mixtral), dict[int, Outcome]()
    scheduler._together = ContinuousBatch(PackedModel(mixtral, policy), policy)
    for number in range(6):
        asked = request(number, (9 if number == 3 else 60, 12))
        scheduler.submit(asked, lambda outcome, number=number: ends.__setitem__(number, outcome))  # type: ignore[misc]
    scheduler.serve()
    assert scheduler._together.pool.held == 0
    scheduler.close()
    alone = Alone(mixtral)
    for number, end in ends.items():
        if how == "one request" and number == 3:
            assert isinstance(end, EngineError)
            assert end.code is ErrorCode.NOT_ENOUGH_MEMORY
            continue
        assert isinstance(end, GenerationResult)
        ids = request(number, (9 if number == 3 else 60, 12)).ids
        expected = alone.generate_from_ids(ids, SamplingParams(max_tokens=12), end_ids=NO_END)
        assert end.token_ids == expected.token_ids
    assert len(ends) == 6


def test_rows_of_jobs_step_aside_for_chats(mixtral: LoadedModel) -> None:
    scheduler, answers, ends = Scheduler(mixtral), dict[int, BatchAnswer](), list[Outcome]()
    above = scheduler._together = ContinuousBatch(PackedModel(mixtral, POLICY), POLICY, most_pages=8)
    lane, _ = scheduler._job_lane(replace(POLICY, ahead=None, kv_type=mixtral.kv_type))
    assert isinstance(lane, ContinuousBatch)
    rows = iter([Preparation(mixtral).prepare(replace(request(number, (40, 20)), row=number)) for number in range(4)])
    lane.sources.append(RowSource(rows, lambda answer: answers.__setitem__(answer.row, answer)))
    looks = iter(range(14))
    lane.go_on(lambda: next(looks, None) is None)
    held = above.pool.held
    assert held > 4
    for number in (7, 8):
        scheduler.submit(request(number, (70, 30)), ends.append)
    scheduler.serve()
    assert len(ends) == 2
    while lane.go_on(lambda: False):
        pass
    assert above.pool.held == 0
    alone = Alone(mixtral)
    for number in range(4):
        expected = alone.generate_from_ids(request(number, (40, 20)).ids, SamplingParams(max_tokens=20), end_ids=NO_END)
        assert answers[number].token_ids == expected.token_ids
    lane.free()
    scheduler.close()
