"""Requests and rows where memory is short: somebody gives way, the longest request has room, and none is lost."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.packed_sweep import PackedModel, Work
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import Sequence
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch, RowSource
from engine.runtime.schedule.request import BatchRequest, Outcome, Preparation
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, opened_model, random_prompt
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint

POLICY = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25, ahead=16)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A model whose keys and values move between its own cache and pages."""
    path: Path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("room") / "model")
    with opened_model(path) as model:
        yield model


def asked_for(number: int, shape: tuple[int, int]) -> BatchRequest:
    ids = tuple(random_prompt(shape[0], seed=number))
    return BatchRequest(0, ids=ids, sampling=SamplingParams(max_tokens=shape[1]), end_ids=NO_END)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", ["mixtral", "quick"])
def test_there_is_room_for_the_longest_request_whatever_others_are_left(
    family: str, request: pytest.FixtureRequest
) -> None:
    """Pages for half of it are what the policy allows."""
    loaded: LoadedModel = request.getfixturevalue(family)
    policy = replace(POLICY, kv_bytes=1)
    shapes = [(40, 150), (200, 56), (20, 30), (120, 40)]
    scheduler, ends, looks = Scheduler(loaded), dict[int, Outcome](), 0
    scheduler._batch = ContinuousBatch(PackedModel(loaded, policy), policy, exact=True)
    assert scheduler._batch.pool.capacity * PAGE_TOKENS == loaded.context_tokens == 256

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        if looks % 4 == 1 and looks < 4 * len(shapes):
            number = looks // 4
            asked = asked_for(number, shapes[number])
            scheduler.submit(asked, lambda outcome: ends.__setitem__(number, outcome))
        assert looks < 2000, "nobody gets on"
        return False

    arrive()
    scheduler.serve(arrive)
    assert scheduler._batch.pool.held == 0
    scheduler.close()
    for number, shape in enumerate(shapes):
        end, asked = ends[number], asked_for(number, shape)
        assert isinstance(end, GenerationResult), end
        expected = Alone(loaded).generate_from_ids(asked.ids, asked.sampling, end_ids=NO_END)
        assert (end.token_ids, end.finish_reason) == (expected.token_ids, expected.finish_reason)


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

    policy = replace(POLICY, sweep_tokens=100)
    scheduler, ends = Scheduler(mixtral), dict[int, Outcome]()
    scheduler._batch = ContinuousBatch(PackedModel(mixtral, policy), policy)
    for number in range(6):
        asked = asked_for(number, (9 if number == 3 else 60, 12))
        scheduler.submit(asked, lambda outcome, number=number: ends.__setitem__(number, outcome))  # type: ignore[misc]
    with monkeypatch.context() as patched:
        patched.setattr(PackedModel, "sweep", sweep)
        scheduler.serve()
    assert scheduler._batch.pool.held == 0
    scheduler.close()
    alone = Alone(mixtral)
    for number, end in ends.items():
        if how == "one request" and number == 3:
            assert end.code is ErrorCode.NOT_ENOUGH_MEMORY
            continue
        ids = asked_for(number, (9 if number == 3 else 60, 12)).ids
        expected = alone.generate_from_ids(ids, SamplingParams(max_tokens=12), end_ids=NO_END)
        assert end.token_ids == expected.token_ids
    assert len(ends) == 6


def test_a_prompt_without_memory_waits_for_those_who_hold_it(
    mixtral: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, scheduler, ends, refused = PackedModel.sweep, Scheduler(mixtral), dict[int, Outcome](), list[int]()

    def sweep(self: PackedModel, work: list[Work]) -> Any:
        assert scheduler._batch is not None
        if work[0].row.is_reading and len(scheduler._batch.rows) > 1:
            refused.append(len(work))
            raise MemoryError
        return (yield from own(self, work))

    asked = [asked_for(number, (60, 12)) for number in range(2)]
    scheduler.submit(asked[0], lambda outcome: ends.__setitem__(0, outcome))

    def joins() -> bool:
        if not refused and scheduler._batch is not None and scheduler._batch.rows:
            scheduler.submit(asked[1], lambda outcome: ends.__setitem__(1, outcome))
            refused.append(0)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(PackedModel, "sweep", sweep)
        scheduler.serve(joins)
    assert refused == [0, 1]
    scheduler.close()
    for number, request in enumerate(asked):
        end = ends[number]
        assert isinstance(end, GenerationResult), end
        assert end.token_ids == Alone(mixtral).answer(request).token_ids


def test_a_row_of_a_job_that_rests_keeps_no_other_out(mixtral: LoadedModel) -> None:
    policy, answers = replace(POLICY, ahead=None), list[GenerationResult]()
    batch = ContinuousBatch(PackedModel(mixtral, policy), policy, most_pages=7)
    shapes = enumerate([(40, 20), (100, 20), (100, 20)], 1)
    *first, last = (Preparation(mixtral).prepare(Sequence(asked_for(*each))) for each in shapes)
    rests, other = (RowSource(iter(each), answers.append) for each in (first, [last]))
    batch.sources.append(rests)
    looks = iter(range(14))
    batch.go_on(lambda: next(looks, None) is None)
    assert len(batch.rows) == 2
    assert batch.give_way()
    rests.rests = True
    batch.sources.append(other)
    while batch.go_on(lambda: False):
        pass
    assert len(answers) == 1
    assert batch.has_ended(other)
    rests.rests = False
    while batch.go_on(lambda: False):
        pass
    assert len(answers) == 3
    batch.free()


def test_rows_of_jobs_step_aside_for_chats(mixtral: LoadedModel) -> None:
    scheduler, answers, ends = Scheduler(mixtral), dict[int, GenerationResult](), list[Outcome]()
    above = scheduler._batch = ContinuousBatch(PackedModel(mixtral, POLICY), POLICY, most_pages=8)
    lane = scheduler.job_lane(replace(POLICY, ahead=None, kv_type=mixtral.kv_type))
    assert isinstance(lane, ContinuousBatch)
    asked = [Sequence(replace(asked_for(number, (40, 20)), row=number)) for number in range(4)]
    rows = map(Preparation(mixtral).prepare, asked)
    lane.sources.append(RowSource(rows, lambda answer: answers.__setitem__(answer.row, answer)))
    looks = iter(range(14))
    lane.go_on(lambda: next(looks, None) is None)
    held = above.pool.held
    assert held > 4
    for number in (7, 8):
        scheduler.submit(asked_for(number, (70, 30)), ends.append)
    scheduler.serve()
    assert len(ends) == 2
    while lane.go_on(lambda: False):
        pass
    assert above.pool.held == 0
    alone = Alone(mixtral)
    for number in range(4):
        expected = alone.generate_from_ids(
            asked_for(number, (40, 20)).ids, SamplingParams(max_tokens=20), end_ids=NO_END
        )
        assert answers[number].token_ids == expected.token_ids
    lane.free()
    scheduler.close()
