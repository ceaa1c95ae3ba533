"""Chats that take part in the sweeps of a batch: they get their own tokens, each once, and the batch gets its own."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.kernels.native.build import library_path
from engine.runtime.batch.packed_sweep import PackedModel, Work
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest, Outcome
from engine.runtime.schedule.scheduler import Scheduler
from engine.runtime.schedule.times import SLICE_S, Times
from tests.engine.loaded_tiny import NO_END, opened_model, random_prompt, spread
from tests.engine.single_streams import Alone
from tests.engine.test_background import Job, serve
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

POLICY = BatchPolicy(rows=6, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25)


@pytest.fixture(scope="module", params=["auto", "int8"])
def quick(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """A model with a fast path of its own for one sequence, whose tokens are far from ties."""
    path: Path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("piggybacked") / "model", prepare=spread)
    with opened_model(path, kv_precision=request.param) as model:
        yield model


def request_of(ids: tuple[int, ...], most: int, number: int = 0, **how: Any) -> BatchRequest:
    return BatchRequest(number, ids=ids, sampling=SamplingParams(max_tokens=most), end_ids=NO_END, **how)


class Watched:
    """Sweeps that had piggybacked rows, by the number of these."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.piggybacked = list[int]()
        own = PackedModel.sweep

        def sweep(model: PackedModel, work: list[Work]) -> Any:
            logits = yield from own(model, work)
            self.piggybacked.append(sum(each.is_piggybacked for each in work))
            return logits

        patch.setattr(PackedModel, "sweep", sweep)


def job_of(scheduler: Scheduler, lengths: list[tuple[int, int]], policy: BatchPolicy) -> Job:
    """Rows on a thread of their own, under way."""
    rows = [
        request_of(tuple(random_prompt(prompt, seed=n)), most, number=n) for n, (prompt, most) in enumerate(lengths)
    ]
    job = Job(scheduler, rows, policy)
    while not scheduler.background.is_busy:
        pass
    return job


class Chat:
    """A request, and when it is asked."""

    def __init__(self, number: int, prompt: int, most: int, after: int, cancel_after: int = 0) -> None:
        self.ids, self.most = tuple(random_prompt(prompt, seed=90 + number)), most
        self.after, self.cancel_after = after, cancel_after
        self.counts, self.ends = list[int](), list[Outcome]()

    def request(self) -> BatchRequest:
        return request_of(
            self.ids,
            self.most,
            on_text=lambda _text, count: self.counts.append(count),
            cancelled=lambda: bool(self.cancel_after) and len(self.counts) >= self.cancel_after,
        )

    def check(self) -> GenerationResult:
        (end,) = self.ends
        count = min(self.most, self.cancel_after or self.most)
        assert (len(end.token_ids), end.generated_tokens) == (count, count)
        assert end.finish_reason == ("cancelled" if count < self.most else "length")
        assert sorted(set(self.counts)) == list(range(1, count + 1))
        return end


def beside_a_job(
    loaded: LoadedModel, chats: list[Chat], rows: list[tuple[int, int]], every: int, patch: pytest.MonkeyPatch
) -> tuple[Job, list[int]]:
    """The job's rows are answered beside these chats, whose own turn comes at one of so many looks."""
    watched, scheduler, looks, draw = Watched(patch), Scheduler(loaded), 0, random.Random(every)
    patch.setattr(Times, "is_due", lambda _times: draw.randrange(every) == 0)
    patch.setattr(Times, "owes", property(lambda _times: draw.randrange(3) == 0))
    waiting = sorted(chats, key=lambda chat: chat.after)

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        while waiting and (looks >= waiting[0].after or not job.thread.is_alive()):
            chat = waiting.pop(0)
            scheduler.submit(chat.request(), chat.ends.append)
        return False

    job = job_of(scheduler, rows, replace(POLICY, kv_type=loaded.kv_type))
    serve(scheduler, [job], arrive)
    while waiting or scheduler.is_busy:
        arrive()
        scheduler.serve(arrive)
    together = scheduler._batch
    assert (together.pool.held, together.below) == (0, [])
    scheduler.close()
    together.pool.elsewhere = int
    assert together.pool.reserve(together.pool.capacity)
    assert len(job.answers) == len(rows)
    return job, watched.piggybacked


@pytest.mark.parametrize("every", [2, 7, 40])
def test_a_chat_beside_a_batch_says_what_it_says_alone(
    quick: LoadedModel, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(0, 40, 60, 12)
    with monkeypatch.context() as patch:
        job, piggybacked = beside_a_job(quick, [chat], [(9, 70)] * 5, every, patch)
    assert sum(piggybacked) > 8
    expected = Alone(quick).generate_from_ids(chat.ids, SamplingParams(max_tokens=60), end_ids=NO_END)
    assert chat.check().token_ids == expected.token_ids
    for row in job.rows:
        assert len(job.answers[row.row].token_ids) == 70


_CHATS = st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 120), st.integers(0, 20))


@settings(max_examples=4, deadline=None)
@given(
    chats=st.lists(_CHATS, min_size=1, max_size=4),
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=7),
    every=st.integers(1, 60),
)
def test_every_chat_and_every_row_ends_once_with_all_its_tokens(
    quick: LoadedModel, chats: list[tuple[int, int, int, int]], rows: list[tuple[int, int]], every: int
) -> None:
    asked = [Chat(number, *shape) for number, shape in enumerate(chats)]
    with pytest.MonkeyPatch.context() as patch:
        job, _ = beside_a_job(quick, asked, rows, every, patch)
    for chat in asked:
        chat.check()
    for number, (_, most) in enumerate(rows):
        assert (job.answers[number].finish_reason, job.answers[number].generated_tokens) == ("length", most)


def test_who_comes_meanwhile_does_not_wait_for_a_sweep_with_guests(
    quick: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, scheduler = Watched(monkeypatch), Scheduler(quick)
    first, second = Chat(0, 9, 200, 0), Chat(1, 9, 4, 0)
    sweeps = list[int]()

    def arrive() -> bool:
        lanes = scheduler._beside
        if not sweeps and lanes and lanes[0].has_piggybacked:
            sweeps.append(len(watched.piggybacked))
            scheduler.submit(second.request(), second.ends.append)
        return False

    job = job_of(scheduler, [(9, 60)] * 3, replace(POLICY, kv_type=quick.kv_type))
    scheduler.submit(first.request(), first.ends.append)
    serve(scheduler, [job], arrive)
    scheduler.close()
    first.check()
    second.check()
    assert watched.piggybacked[sweeps[0]] == 0  # not the one that was under way: its piggybacked rows had left


def test_a_token_within_a_sweep_of_the_background_counts_as_what_it_would_have_taken() -> None:
    now = [0.0]
    times = Times(lambda: now[0])
    times.start()
    alone_s, sweep_s, chat, batch = 0.01, 0.05, 0, 0
    for _ in range(300):
        times.enter()
        while True:
            now[0] += alone_s
            chat += 1
            times.wrote(1.0)
            times.note(counts=True)
            if not times.owes:
                break
        times.leave()
        while not times.is_due():
            now[0] += sweep_s
            times.wrote(1.0)
            chat, batch = chat + 1, batch + 1
    assert times.token_s == pytest.approx(alone_s)
    assert chat * alone_s / now[0] == pytest.approx(batch * sweep_s / now[0], abs=SLICE_S / now[0] + 0.01)
    assert chat * alone_s / now[0] > 0.54
