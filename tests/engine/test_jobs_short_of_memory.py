"""A second program takes a card's memory while a job's rows are answered: they are computed in less, and come out."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from time import monotonic

import pytest

from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.devices import emulated, memory_budget
from engine.devices.memory_budget import MemoryCategory
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.planner.schedules import HYBRID, KLOTSKI, Schedule
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor, ContinuousBatch
from engine.runtime.schedule.request import BatchRequest
from tests.engine.loaded_tiny import NO_END, opened_model
from tests.engine.on_devices import MIB, NEW_TOKENS, PROMPT, Reference, reference
from tests.refusals import refused

ROWS, AT_ONCE, SLOTS = 6, 512, 16


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield reference("qwen3_moe", tmp_path_factory.mktemp("short"))
    reference.cache_clear()


@contextmanager
def opened(expected: Reference, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoadedModel]:
    """A model on a card whose memory is looked at before each sweep."""
    monkeypatch.setattr(memory_budget, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(emulated, "OTHERS", {})
    with opened_model(
        expected.folder, "fp32", device="emulated:slow-link", vram_bytes=8 * MIB, cache_slots=SLOTS
    ) as loaded:
        yield loaded


@contextmanager
def answering(loaded: LoadedModel, schedule: Schedule | None) -> Iterator[tuple[BatchExecutor, ContinuousBatch]]:
    policy = BatchPolicy(rows=ROWS, kv_bytes=16 * MIB, sweep_tokens=1024, micro_batch_tokens=AT_ONCE, schedule=schedule)
    with closing(BatchExecutor(loaded, policy)) as executor:
        assert isinstance(executor._batch, ContinuousBatch)
        yield executor, executor._batch


def take_all_but(loaded: LoadedModel, nbytes: int) -> None:
    """Leaves the model its weights that are no experts', and so many bytes besides."""
    (device,) = loaded.devices.devices
    assert device.watch is not None
    use = device.memory.use()
    emulated.OTHERS[device.name] = device.watch.free + use.used - use.by_category[MemoryCategory.WEIGHTS] - nbytes


def rows(on_text: Callable[[str, int], None] = lambda _text, _count: None) -> Iterator[BatchRequest]:
    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    return iter(
        [
            BatchRequest(row, ids=tuple(PROMPT), sampling=sampling, end_ids=NO_END, on_text=on_text)
            for row in range(ROWS)
        ]
    )


def assert_right(answers: list[GenerationResult], expected: Reference) -> None:
    assert [answer.error for answer in answers] == [None] * ROWS
    assert [list(answer.token_ids) for answer in answers] == [expected.first] * ROWS


@pytest.mark.parametrize("schedule", [HYBRID, KLOTSKI], ids=["hybrid", "klotski"])
@pytest.mark.parametrize("after", [0, 3 * ROWS], ids=["at once", "later"])
def test_rows_are_answered_in_what_is_left(
    expected: Reference, monkeypatch: pytest.MonkeyPatch, schedule: Schedule, after: int
) -> None:
    with opened(expected, monkeypatch) as loaded, answering(loaded, schedule) as (executor, batch):
        answers, tokens = list[GenerationResult](), [0]

        def wrote(_text: str, _count: int) -> None:
            tokens[0] += 1
            if tokens[0] == after:
                take_all_but(loaded, 2**18)

        if not after:
            take_all_but(loaded, 2**18)
        executor.run(rows(wrote), answers.append)
        assert_right(answers, expected)
        assert loaded.devices.experts.slots < SLOTS
        assert loaded.devices.devices[0].memory.excess == 0
        if schedule is KLOTSKI:
            assert PAGE_TOKENS <= batch.model._micro_batch_tokens < AT_ONCE
        emulated.OTHERS.clear()
        for _ in range(memory_budget.CALM_LOOKS):
            answers.clear()
            executor.run(rows(), answers.append)
            assert_right(answers, expected)
        assert batch.model._micro_batch_tokens == AT_ONCE


def test_where_one_row_alone_has_no_room_the_rows_wait_for_the_others_to_leave(
    expected: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(expected, monkeypatch) as loaded, answering(loaded, None) as (executor, _batch):
        answers, source = list[GenerationResult](), rows()
        take_all_but(loaded, 0)
        with refused(ErrorCode.NOT_ENOUGH_MEMORY, match="not even one row has room"):
            executor.run(source, answers.append)
        assert answers == []
        emulated.OTHERS.clear()
        assert loaded.devices is not None
        for _ in range(memory_budget.CALM_LOOKS):
            loaded.devices.have_news(monotonic())
        executor.run(source, answers.append)
        assert_right(answers, expected)
