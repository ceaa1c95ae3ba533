"""Several jobs on one model: they share sweeps evenly, beside requests, and what happens to one harms no other."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.jobs.rows import BatchOutcome, never
from engine.kernels.native.paged_attention import KvType
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch, RowSource
from engine.runtime.schedule.request import BatchRequest, Outcome, Preparation
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone

POLICY = BatchPolicy(rows=6, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25)
PATIENCE_S = 60.0


def row(number: int, prompt: int, most: int, seed: int = 0) -> BatchRequest:
    ids = tuple(random_prompt(prompt, seed=seed + number % 3))
    return BatchRequest(number, ids=ids, sampling=SamplingParams(max_tokens=most), end_ids=NO_END)


class Job:
    """A job on a thread of its own, as the engine's process has it."""

    def __init__(
        self,
        scheduler: Scheduler,
        rows: list[BatchRequest],
        policy: BatchPolicy = POLICY,
        *,
        on_row: Callable[[GenerationResult], None] = lambda _answer: None,
        cancelled: Callable[[], bool] = lambda: False,
        pauses_after: int = 0,
    ) -> None:
        self.rows, self.answers, self.outcomes = (
            rows,
            dict[int, GenerationResult](),
            list[BatchOutcome | BaseException](),
        )
        self.most_under_way = 0
        self._policy, self._told, self._cancelled, self._pauses_after = policy, on_row, cancelled, pauses_after
        self._background = scheduler.background
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.place = self._background.call(lambda: self._background.join(self._policy))
            try:
                rows = iter(self.rows)
                while True:
                    outcome = self.place.run(rows, self._on_row, self._pauses, self._cancelled)
                    self.outcomes.append(outcome)
                    if outcome is not BatchOutcome.YIELDED:
                        break
            finally:
                self.place.close()
        except BaseException as error:
            self.outcomes.append(error)

    def _pauses(self) -> bool:
        self.most_under_way = max(self.most_under_way, self.place.under_way[0])
        return bool(self._pauses_after) and len(self.answers) >= self._pauses_after * (len(self.outcomes) + 1)

    def _on_row(self, answer: GenerationResult) -> None:
        assert answer.row not in self.answers
        self._told(answer)
        self.answers[answer.row] = answer

    def check(self, loaded: LoadedModel) -> None:
        assert self.outcomes[-1] is BatchOutcome.FINISHED
        alone = Alone(loaded)
        assert set(self.answers) == {request.row for request in self.rows}
        for request in self.rows:
            expected = alone.generate_from_ids(request.ids, request.sampling, end_ids=NO_END)
            assert self.answers[request.row].token_ids == expected.token_ids


def serve(scheduler: Scheduler, jobs: list[Job], arrive: Callable[[], bool] = lambda: False) -> None:
    """What the engine's thread does until all jobs and requests have ended."""
    for _ in range(int(PATIENCE_S / 0.001)):
        if not (scheduler.is_busy or any(job.thread.is_alive() for job in jobs)):
            return
        arrive()
        scheduler.serve(arrive)
        for job in jobs:
            job.thread.join(0.001)
    raise AssertionError("a job or a request does not end")


_SHAPES = st.tuples(st.integers(1, 50), st.integers(1, 25))


@settings(max_examples=3, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.lists(_SHAPES, max_size=7), st.integers(0, 3)), min_size=2, max_size=3),
    chats=st.lists(st.tuples(_SHAPES, st.integers(1, 60)), max_size=4),
)
def test_jobs_and_chats_are_answered_as_if_alone(
    mixtral: LoadedModel, jobs: list[tuple[list[tuple[int, int]], int]], chats: list[tuple[tuple[int, int], int]]
) -> None:
    """Rows of each job and how many are answered before it pauses; chats and when they come."""
    scheduler, looks, ends = Scheduler(mixtral), 0, dict[int, list[Outcome]]()
    waiting = sorted(enumerate(chats), key=lambda entry: entry[1][1])
    asked = {number: row(0, *shape, seed=number) for number, (shape, _) in enumerate(chats)}

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        while waiting and looks >= waiting[0][1][1]:
            number, _ = waiting.pop(0)
            scheduler.submit(asked[number], ends.setdefault(number, []).append)
        return False

    running = [
        Job(scheduler, [row(number, *shape) for number, shape in enumerate(rows)], pauses_after=pauses)
        for rows, pauses in jobs
    ]
    serve(scheduler, running, arrive)
    while waiting or scheduler.is_busy:
        arrive()
        scheduler.serve(arrive)
    assert not scheduler.background._lanes
    scheduler.close()
    for job in running:
        job.check(mixtral)
    alone = Alone(mixtral)
    for number, request in asked.items():
        (end,) = ends[number]
        assert not isinstance(end, BaseException)
        assert end.token_ids == alone.generate_from_ids(request.ids, request.sampling, end_ids=NO_END).token_ids


def together(scheduler: Scheduler, make: Callable[[], list[Job]]) -> list[Job]:
    """Jobs whose rows are all there before the first sweep."""
    jobs = make()
    while len(scheduler.background._calls) < len(jobs):
        pass
    return jobs


def test_jobs_have_the_same_number_of_rows_in_each_sweep(mixtral: LoadedModel) -> None:
    scheduler = Scheduler(mixtral)
    jobs = together(scheduler, lambda: [Job(scheduler, [row(n, 6, 12) for n in range(count)]) for count in (30, 12)])
    left = list[int]()

    def look() -> bool:
        if len(jobs[1].answers) >= 9 and not left:
            left.append(len(jobs[0].answers))
        return False

    serve(scheduler, jobs, look)
    assert jobs[1].most_under_way == 3
    assert jobs[0].most_under_way == 6  # once it is alone
    assert left[0] <= 15
    for job in jobs:
        job.check(mixtral)
    scheduler.close()


def test_what_happens_to_one_job_harms_no_other(mixtral: LoadedModel) -> None:
    scheduler = Scheduler(mixtral)
    full = EngineError(ErrorCode.DISK_FULL, "The disk is full.")

    def breaks(_answer: GenerationResult) -> None:
        raise full

    def unreadable() -> Iterator[BatchRequest]:
        yield row(0, 5, 5)
        raise OSError("gone")

    rows = [row(n, 6, 12) for n in range(8)]
    stopped = Job(scheduler, rows, cancelled=lambda: len(stopped.answers) >= 2)
    broken, whole = Job(scheduler, rows, on_row=breaks), Job(scheduler, rows)
    gone = Job(scheduler, unreadable())  # type: ignore[arg-type]
    other = Job(scheduler, rows, replace(POLICY, window=16, kept=2))  # it stores something else in its pages
    serve(scheduler, [stopped, broken, whole, gone, other])
    assert stopped.outcomes == [BatchOutcome.CANCELLED]
    assert broken.outcomes == [full]
    assert isinstance(gone.outcomes[0], OSError)
    assert other.outcomes == [BatchOutcome.FINISHED]
    whole.check(mixtral)
    assert not scheduler.background._lanes
    pool = scheduler._batch.pool
    assert (pool.held, pool.reserve(pool.capacity)) == (0, True)
    assert not scheduler._batch.below
    scheduler.close()


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    "other",
    [{"window": 16, "kept": 2}, {"kv_type": KvType.FP16}, {"kv_type": KvType.INT8}],
    ids=["window", "fp16", "int8"],
)
def test_jobs_that_keep_context_in_another_way_have_one_budget_with_chats(
    mixtral: LoadedModel, other: dict[str, Any]
) -> None:
    """All of it while nobody else wants any, and what is left while chats go on; never more than there is in all."""
    pages = 12
    scheduler, ends = Scheduler(mixtral), dict[int, Outcome]()
    policy = replace(POLICY, ahead=16)
    together = scheduler._batch = ContinuousBatch(PackedModel(mixtral, policy), policy, most_pages=pages)
    job = Job(scheduler, [row(n, 60, 36) for n in range(8)], replace(POLICY, **other))  # three pages each
    most_job, most_chats = [0], [0]

    def look() -> bool:
        assert together.pool.in_use <= pages
        for lane in together.below:
            assert lane.pool is together.pool
            most_job[0] = max(most_job[0], sum(len(row.pages) for row in lane.rows))
        most_chats[0] = max(most_chats[0], sum(len(row.pages) for row in together.rows))
        if len(job.answers) == 2 and not ends and not scheduler.is_busy:
            for number in range(4):
                scheduler.submit(row(number, 70, 40), lambda outcome, number=number: ends.update({number: outcome}))
        return False

    serve(scheduler, [job], look)
    assert job.outcomes == [BatchOutcome.FINISHED]
    assert len(ends) == 4
    assert all(isinstance(end, GenerationResult) and end.generated_tokens == 40 for end in ends.values())
    assert most_job[0] > pages // 2
    assert most_chats[0] > pages // 2
    if "kv_type" not in other:
        scheduler.close()
        return
    exact = other["kv_type"] is KvType.FP16
    for each in job.rows:
        assert job.answers[each.row].generated_tokens == 36
        assert not exact or job.answers[each.row].token_ids == Alone(mixtral).answer(each).token_ids
    scheduler.close()


@pytest.mark.parametrize(
    ("family", "changed", "has_pages"), [("gemma4_text", {"sliding_window": 40}, True), ("zaya", {}, False)]
)
def test_a_job_with_pages_of_no_use_to_it_has_caches_of_its_own(
    family: str, changed: dict[str, Any], has_pages: bool
) -> None:
    """Of what has a window and is called row by row, pages hold narrow values of the other layers."""
    loaded = tiny_loaded(family, **changed)
    scheduler = Scheduler(loaded)
    begins = tuple(random_prompt(50, seed=9))
    rows = [replace(each := row(n, 20, 6), ids=(*begins, *each.ids)) for n in range(3)]
    job = Job(scheduler, rows, replace(POLICY, kv_type=KvType.FP16))
    lanes, held = list[ContinuousBatch](), list[int]()

    def look() -> bool:
        lanes.extend(scheduler._beside)
        held.append(scheduler.kv_bytes)
        return False

    serve(scheduler, [job], look)
    assert scheduler._batch is not None
    assert bool(lanes) == has_pages
    assert max(held) > 0  # what the window shows as context
    assert job.outcomes == [BatchOutcome.FINISHED]
    assert scheduler._batch.pool.in_use == 0
    for each in job.rows:
        assert job.answers[each.row].token_ids == Alone(loaded).answer(each).token_ids
    scheduler.close()


@pytest.mark.parametrize(("family", "takes_turns"), [("doge", True), ("qwen3_next", False), ("deepseek_v32", False)])
def test_jobs_whose_rows_cannot_be_packed_take_turns(family: str, takes_turns: bool) -> None:
    loaded = tiny_loaded(family)
    scheduler, ends = Scheduler(loaded), list[Outcome]()
    jobs = together(scheduler, lambda: [Job(scheduler, [row(n, 20, 6) for n in range(3)]) for _ in range(2)])
    scheduler.submit(row(0, 9, 8), ends.append)
    serve(scheduler, jobs)
    assert len(ends) == 1
    for job in jobs:
        assert ("one by one" in job.place.note) == takes_turns
        job.check(loaded)
    scheduler.close()


@pytest.mark.parametrize("family", ["granitemoehybrid", "nllb-moe"])
@pytest.mark.parametrize("tokens", [0, 4])
def test_a_resting_job_lets_another_one_pass(family: str, tokens: int) -> None:
    """Whether it rests in its prompt or in its answer, which goes on where it was."""
    loaded, policy = tiny_loaded(family), replace(POLICY, rows=1)
    lane = ContinuousBatch(PackedModel(loaded, policy, opens=False), policy, exact=True)
    answers, written = dict[int, GenerationResult](), list[int]()
    first, second = replace(row(0, 40, 8), on_text=lambda _text, count: written.append(count)), row(1, 30, 5)
    with torch.inference_mode():
        sources = [
            RowSource(
                Preparation(loaded).rows(iter([each]), lambda _answer: None), lambda a: answers.update({a.row: a})
            )
            for each in (first, second)
        ]
        lane.sources.append(sources[0])
        assert lane.go_on(lambda: len(written) >= tokens)
        sources[0].rests = True
        assert not lane.go_on(never)  # nobody else wants it
        lane.sources.append(sources[1])
        lane.go_on(never)
        assert list(answers) == [1]
        assert lane.has_ended(sources[1])
        assert not lane.has_ended(sources[0])
        sources[0].rests = False
        lane.go_on(never)
        assert lane.has_ended(sources[0])
    for each in (first, second):
        alone = Alone(loaded).answer(replace(each, on_text=lambda _text, _count: None))
        assert answers[each.row].token_ids == alone.token_ids
    lane.free()


def test_a_model_that_is_freed_ends_jobs_in_a_sentence(mixtral: LoadedModel) -> None:
    scheduler = Scheduler(mixtral)
    job = Job(scheduler, [row(n, 6, 40) for n in range(9)])
    while not job.answers:
        scheduler.serve(lambda: bool(job.answers))
    scheduler.close()
    job.thread.join(PATIENCE_S)
    (end,) = job.outcomes
    assert "resume" in end.message
    late = Job(scheduler, [row(0, 5, 5)])
    late.thread.join(PATIENCE_S)
    assert isinstance(late.outcomes[0], EngineError)
