"""Requests that come, go and share: each ends once, with the tokens that it would have had alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bench.opened import OneSequence
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.jobs.rows import BatchOutcome
from engine.kernels.native.build import library_path
from engine.kernels.native.paged_attention import PAGE_TOKENS, Piece
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.beam_search import beam_search
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.paged_steps import PagedSteps
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest, Outcome
from engine.runtime.schedule.row import PagedRow
from engine.runtime.schedule.scheduler import Scheduler
from engine.runtime.schedule.times import Times
from tests.engine.loaded_tiny import NO_END, opened_model, random_prompt, spread, tiny_loaded
from tests.engine.single_streams import Alone, answered_together, search_over
from tests.engine.tiny_families import tiny_checkpoint

POLICY = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25, ahead=3)


_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"dry_multiplier": 0.8, "dry_range": 64},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": ((5, 3.0), (7, -3.0))},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.02, "seed": 7, "repetition_penalty": 1.1},
)


class Asked:
    """One request and what came of it."""

    def __init__(self, prompt: int, most: int, cancel_after: int, text: int) -> None:
        self.ids, self.most, self.cancel_after = tuple(random_prompt(prompt, seed=text % 3)), most, cancel_after
        self.sampling = SamplingParams(max_tokens=most, **_SAMPLINGS[text % len(_SAMPLINGS)])
        self.ends: list[Outcome] = []
        self.watched: list[int] = []

    def request(self) -> BatchRequest:
        return BatchRequest(
            0,
            ids=self.ids,
            sampling=self.sampling,
            end_ids=NO_END,
            on_text=lambda _text, count: self.watched.append(count),
            cancelled=lambda: bool(self.cancel_after) and len(self.watched) >= self.cancel_after,
        )

    def check(self, alone: Alone) -> None:
        (end,) = self.ends
        expected = alone.generate_from_ids(self.ids, self.sampling, end_ids=NO_END)
        count = min(self.most, self.cancel_after or self.most)
        assert end.token_ids == expected.token_ids[:count]
        assert end.finish_reason == ("cancelled" if count < self.most else "length")
        assert (end.prompt_tokens, end.generated_tokens) == (len(self.ids), count)
        assert sorted(set(self.watched)) == list(range(1, count + 1))


def _limit_pages(scheduler: Scheduler, loaded: LoadedModel, pages: int) -> ContinuousBatch:
    batch = scheduler._batch = ContinuousBatch(PackedModel(loaded, POLICY), POLICY, most_pages=pages)
    return batch


_SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 30), st.integers(0, 9))


@settings(max_examples=3, deadline=None)
@given(
    chats=st.lists(st.tuples(_SHAPES, st.integers(0, 25)), min_size=1, max_size=7),
    rows=st.lists(_SHAPES, max_size=6),
    pages=st.integers(7, 14),
)
def test_chats_and_rows_are_answered_as_if_alone(
    mixtral: LoadedModel, chats: list[tuple[tuple[int, int, int, int], int]], rows: list[tuple[int, ...]], pages: int
) -> None:
    """Chats with the number of asks for `until` after which they come, and the rows of a file beside them."""
    scheduler = Scheduler(mixtral)
    batch = _limit_pages(scheduler, mixtral, pages)
    waiting = sorted(((Asked(*shape), after) for shape, after in chats), key=lambda entry: entry[1])
    chat_list, looks = [asked for asked, _ in waiting], 0

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        while waiting and looks >= waiting[0][1]:
            asked, _ = waiting.pop(0)
            scheduler.submit(asked.request(), asked.ends.append)
        return False

    def due() -> bool:
        arrive()
        return scheduler.is_due()

    row_list, answers = [Asked(*row) for row in rows], dict[int, GenerationResult]()

    def answered(answer: GenerationResult) -> None:
        assert answer.row not in answers
        answers[answer.row] = answer

    executor = BatchExecutor(mixtral, POLICY)
    asked_rows = iter(
        [
            BatchRequest(n, ids=row.ids, sampling=SamplingParams(max_tokens=row.most), end_ids=NO_END)
            for n, row in enumerate(row_list)
        ]
    )
    while executor.run(asked_rows, answered, due) is BatchOutcome.YIELDED:
        scheduler.share(arrive)
    while waiting or scheduler.is_busy:
        arrive()
        scheduler.serve(arrive)
    executor.close()
    assert (batch.pool.held, len(answers), scheduler.is_busy) == (0, len(rows), False)
    assert batch.pool.reserve(batch.pool.capacity)
    scheduler.close()
    alone = Alone(mixtral)
    for asked in chat_list:
        asked.check(alone)
    for number, row in enumerate(row_list):
        expected = alone.generate_from_ids(row.ids, SamplingParams(max_tokens=row.most), end_ids=NO_END)
        assert answers[number].token_ids == expected.token_ids


def test_two_chats_do_not_wait_for_each_other(mixtral: LoadedModel) -> None:
    scheduler, order = Scheduler(mixtral), list[str]()
    for name in "ab":
        request = BatchRequest(
            0,
            ids=tuple(random_prompt(9)),
            sampling=SamplingParams(max_tokens=8),
            end_ids=NO_END,
            on_text=lambda _text, _count, name=name: order.append(name),  # type: ignore[misc]
        )
        scheduler.submit(request, lambda _outcome: None)
    scheduler.serve()
    assert "".join(order) == "ab" * 8


_DYNAMIC = {
    "max_position_embeddings": 40,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
_LONG |= {"original_max_position_embeddings": 40}
_AGAIN = {"rope_parameters": {**_LONG, "short_mscale": 1.1, "long_mscale": 1.3}, "sliding_window": None}
_AGAIN |= {"original_max_position_embeddings": 40}
_BY_LENGTH = [("qwen3_moe", _DYNAMIC), ("llama", {"rope_parameters": _LONG}), ("phimoe", _AGAIN)]
_BY_TURNS = [("doge", {}), ("nllb-moe", {}), *_BY_LENGTH, ("longcat_flash", {}), ("inkling2", {})]


@pytest.mark.parametrize(("family", "changed"), _BY_TURNS)
def test_what_cannot_share_steps_takes_turns(family: str, changed: dict[str, Any]) -> None:
    """Prompts, tokens and beams one after the other, whoever comes or leaves; also over fewer pages than they want.
    Where angles depend on the length of a context that is for those alone that are too long."""
    loaded = tiny_loaded(family, **changed)
    samplings = (
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=12, repetition_penalty=1.3),
        SamplingParams(max_tokens=6, beams=3),
        SamplingParams(max_tokens=9, temperature=0.8, seed=4),
        SamplingParams(max_tokens=20),
    )
    order, ends, alone = list[int](), dict[int, Outcome](), Alone(loaded)

    def request(number: int) -> BatchRequest:
        return BatchRequest(
            0,
            ids=tuple(random_prompt((35, 9, 20, 60, 33)[number], seed=number)),
            sampling=samplings[number],
            end_ids=NO_END,
            on_text=lambda _text, _count: order.append(number),
            cancelled=lambda: number == 4 and order.count(4) >= 5,
        )

    expected = [alone.answer(replace(request(number), cancelled=lambda: False)).token_ids for number in range(5)]
    for pages in (0, 16):
        scheduler = Scheduler(loaded)
        if pages:
            turns = scheduler._batch
            assert turns.model.are_packed is ((family, changed) in _BY_LENGTH)
            scheduler._batch = ContinuousBatch(turns.model, turns._policy, pages, exact=True)
        order.clear()
        for number in range(5):
            scheduler.submit(request(number), lambda outcome, number=number: ends.__setitem__(number, outcome))  # type: ignore[misc]
        scheduler.serve()
        for number in range(5):
            end = ends[number]
            assert isinstance(end, GenerationResult), end
            assert end.token_ids == expected[number][: 5 if number == 4 else None]
        assert pages or order.index(3) < 7  # nobody waits for another's end
        assert not scheduler.is_busy
        scheduler.close()
        assert (scheduler.kv_tokens, scheduler.kv_bytes) == (0, 0)


def test_beams_wait_for_their_turn_and_others_do_not_wait_for_them(mixtral: LoadedModel) -> None:
    scheduler, ended = Scheduler(mixtral), list[str]()
    kinds = {"beams": (SamplingParams(max_tokens=9, beams=3), 1), "plain": (SamplingParams(max_tokens=3), 1)}
    for name in ("beams", "more beams", "plain"):
        sampling, _ = kinds[name.removeprefix("more ")]
        request = BatchRequest(0, ids=tuple(random_prompt(9)), sampling=sampling, end_ids=NO_END)
        scheduler.submit(request, lambda outcome, name=name: ended.append(name))  # type: ignore[misc]
    scheduler.serve()
    assert ended == ["plain", "beams", "more beams"]


@pytest.mark.parametrize("family", ["mixtral", "doge"])
def test_what_cannot_be_answered_is_told_and_harms_no_other(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In company, and in turns: there a step that fails ends its own request, whoever asks."""
    loaded, write = tiny_loaded(family), PagedSteps.write
    scheduler, ends, has_own = Scheduler(loaded), dict[str, Outcome](), family == "doge"

    def ask(name: str, ids: tuple[int, ...]) -> None:
        request = BatchRequest(0, ids=ids, sampling=SamplingParams(max_tokens=3), end_ids=NO_END)
        scheduler.submit(request, lambda outcome: ends.__setitem__(name, outcome))

    ask("too long", tuple(random_prompt(loaded.context_tokens)))
    ask("fits", tuple(random_prompt(5)))
    scheduler.serve()
    assert isinstance(ends["too long"], EngineError)
    assert ends["too long"].code is ErrorCode.PROMPT_TOO_LONG
    assert isinstance(ends["fits"], GenerationResult)

    def fails(*_args: object, **_options: object) -> torch.Tensor:
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, "The card is gone.")

    def fails_for_one(steps: PagedSteps, ids: Sequence[int], pieces: Sequence[Piece], *more: Any) -> torch.Tensor:
        return fails() if has_own and pieces[0].held >= 7 else write(steps, ids, pieces, *more)

    with monkeypatch.context() as patched:
        patched.setattr(PagedSteps, "write", fails_for_one)
        ask("it", tuple(random_prompt(7)))
        ask("beside it", tuple(random_prompt(4)))
        scheduler.serve()
        sampling = SamplingParams(max_tokens=3)
        prompts = [tuple(random_prompt(length)) for length in (7, 4)]
        asked = [BatchRequest(n, ids=ids, sampling=sampling, end_ids=NO_END) for n, ids in enumerate(prompts)]
        answers = answered_together(scheduler, asked)
    assert isinstance(ends["it"], EngineError if has_own else GenerationResult)
    assert isinstance(ends["beside it"], GenerationResult)
    assert [answers[n].error is not None for n in range(2)] == [has_own, False]
    with monkeypatch.context() as patched:
        patched.setattr(ContinuousBatch, "go_on", fails)
        ask("again", tuple(random_prompt(5)))
        ask("with it", tuple(random_prompt(6)))
        scheduler.serve()
    with monkeypatch.context() as patched:
        patched.setattr(ContinuousBatch, "row_of", fails)
        ask("never begun", tuple(random_prompt(5)))
        ask("behind it", tuple(random_prompt(6)))
        scheduler.serve()
    for name in ("again", "with it", "never begun", "behind it"):
        assert isinstance(ends[name], EngineError)
    assert not scheduler.is_busy


def test_who_waits_for_a_place_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.schedule.continuous_batch._MOST_IN_TURNS", 1)
    scheduler, written, ends, told = Scheduler(tiny_loaded("doge")), list[int](), list[Outcome](), list[int]()
    first = BatchRequest(
        0,
        ids=tuple(random_prompt(9)),
        sampling=SamplingParams(max_tokens=9),
        end_ids=NO_END,
        on_text=lambda _text, count: written.append(count),
    )
    scheduler.submit(first, lambda _outcome: None)

    def ended(outcome: Outcome) -> None:
        ends.append(outcome)
        told.append(len(written))

    scheduler.submit(replace(first, cancelled=lambda: len(written) >= 3), ended)
    scheduler.serve()
    (end,) = ends
    assert (end.finish_reason, told, len(written)) == ("cancelled", [3], 9)


def test_time_is_shared_evenly_once_everybody_has_begun() -> None:
    now = [0.0]
    times = Times(lambda: now[0])
    times.start()
    requests = background = 0.0
    for step in range(200):
        times.enter()
        while True:  # at least one token, and as many as are owed
            now[0] += 0.1
            requests += 0.1
            times.note(counts=True)
            if not times.owes:
                break
        times.leave()
        while not times.is_due():
            took = 0.25 if step % 3 else 0.02
            now[0] += took
            background += took
    assert abs(requests - background) <= 0.35
    times.enter()
    now[0] += 5.0
    times.note(counts=False)  # a long prompt, say
    assert not times.owes or times._owed_s <= 0.25


native = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")


_INDEX: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": 32, "index_n_heads": 32},
    "glm_moe_dsa": {"index_topk": 32, "index_n_heads": 32},
    "minimax_m3_vl_text": {"index_topk_blocks": 8},
}
_QUICK = [
    *(("qwen3_moe", "auto"), ("qwen3_moe", "int8"), ("deepseek_v3", "auto"), ("deepseek_v32", "auto")),
    *(pytest.param((each, "auto"), marks=pytest.mark.exhaustive) for each in ("glm_moe_dsa", "minimax_m3_vl_text")),
]


@pytest.fixture(scope="module", params=_QUICK)
def quick(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """A model whose steps and sweeps the kernels compute."""

    family, kv_precision = request.param
    folder = tmp_path_factory.mktemp("moving") / "model"
    path: Path = tiny_checkpoint(family, folder, prepare=spread, **_INDEX.get(family, {}))
    with opened_model(path, kv_precision=kv_precision) as model:
        yield model


@pytest.mark.takes_turns(3)
@native
@pytest.mark.parametrize(
    ("prompt", "sampling"), [*((prompt, {}) for prompt in (5, 31, 32, 70)), *((9, one) for one in _SAMPLINGS[1:])]
)
def test_an_answer_that_gets_company_is_what_it_is_alone(
    quick: LoadedModel, prompt: int, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is read again either."""
    read = list[int]()
    own: Callable[..., torch.Tensor] = PagedSteps.read

    def watched(self: PagedSteps, ids: list[int], *args: Any) -> torch.Tensor:
        read.append(len(ids))
        return own(self, ids, *args)

    monkeypatch.setattr(PagedSteps, "read", watched)
    scheduler, ends = Scheduler(quick), dict[int, Outcome]()
    asked = SamplingParams(max_tokens=50, **sampling)

    def request(seed: int) -> BatchRequest:
        return BatchRequest(0, ids=tuple(random_prompt(prompt, seed=seed)), sampling=asked, end_ids=NO_END)

    def ask(number: int) -> None:
        scheduler.submit(request(number), lambda outcome: ends.__setitem__(number, outcome))

    looks = 0

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        if looks in (2, 4):
            ask(looks)
        return False

    ask(0)
    scheduler.serve(arrive)
    assert read == [prompt] * 3
    for number in (0, 2, 4):
        end = ends[number]
        assert end.token_ids == Alone(quick).answer(request(number)).token_ids
    _is_empty(scheduler)


def _is_empty(scheduler: Scheduler) -> None:
    pool = scheduler._batch.pool if scheduler._batch is not None else None
    assert pool.held == 0
    assert pool.reserve(pool.capacity)
    scheduler.close()


_COMPANY = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 20), st.sampled_from([1, 1, 2, 3, 5, 11])), min_size=2, max_size=4
)


@pytest.mark.takes_turns(2)
@native
@settings(max_examples=3, deadline=None)
@given(company=_COMPANY, pages=st.integers(10, 60))
def test_beams_are_forks_of_pages_and_share_steps(
    quick: LoadedModel, company: list[tuple[int, int, int]], pages: int
) -> None:
    """Each finds what it finds alone, however many there are and however often they step aside; else it is refused."""

    def request(number: int) -> BatchRequest:
        prompt, most, beams = company[number]
        sampling = SamplingParams(max_tokens=most, beams=beams, seed=1)
        return BatchRequest(0, ids=tuple(random_prompt(prompt, seed=number % 3)), sampling=sampling, end_ids=NO_END)

    scheduler, ends = Scheduler(quick), dict[int, Outcome]()
    scheduler._batch.free()
    policy = scheduler._batch._policy
    model = PackedModel(quick, policy)
    scheduler._batch = ContinuousBatch(model, policy, pages, kept=None, keeps=True, exact=True)
    for number in range(len(company)):
        scheduler.submit(request(number), lambda outcome, number=number: ends.__setitem__(number, outcome))  # type: ignore[misc]
    scheduler.serve()
    _is_empty(scheduler)
    for number, (prompt, most, beams) in enumerate(company):
        end, alone = ends[number], Scheduler(quick)
        if isinstance(end, EngineError):
            least = 1 + (prompt + most) // PAGE_TOKENS
            assert end.code is ErrorCode.NOT_ENOUGH_MEMORY
            assert least + beams * (2 + most // PAGE_TOKENS) > pages
            continue
        assert end.token_ids == alone.answer(request(number)).token_ids
        alone.close()


class Copies(OneSequence):
    """Beams with pages of their own, of which every step is one alone."""

    def __init__(self, loaded: LoadedModel, prompt: list[int], width: int) -> None:
        super().__init__(loaded)
        self._prompt, self.first = prompt, self.read(prompt)
        self._beams = [self._row, *(self._copy(self._row) for _ in range(width - 1))]

    def _copy(self, row: PagedRow) -> PagedRow:
        """As much as it holds, in other pages."""
        caches, new = self._batch.model.caches, self._begun(self._prompt)
        assert isinstance(caches, PagedCaches)
        new.sequence.ids += row.sequence.ids
        assert new.reserve_next()
        new.piece(row.held)
        for source, target in zip(row.pages.tolist(), new.pages.tolist(), strict=False):
            caches.copy_page(source, target)
        for place, window in row._windows.items():
            caches.copy_window(window, new._windows[place])
        if row.state is not None:
            caches.copy_state(row.state, new._into)
        new.has_read(row.held)
        return new

    def reorder(self, sources: torch.Tensor) -> None:
        before, self._beams = self._beams, []
        for source in sources.tolist():
            is_first = before[source] not in self._beams
            self._beams.append(before[source] if is_first else self._copy(before[source]))
        for row in before:
            if row not in self._beams:
                row.close()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        each = []
        for token, row in zip(tokens.flatten().tolist(), self._beams, strict=True):
            self._row = row
            each.append(super().step(token))
        return torch.cat(each)


@pytest.mark.takes_turns(2)
@native
def test_beams_over_pages_are_sequences_of_their_own(quick: LoadedModel) -> None:
    lengths = list[int]()
    for beams in (2, 9):
        lengths.clear()
        scheduler, prompt = Scheduler(quick), random_prompt(45)
        sampling = SamplingParams(max_tokens=40, beams=beams)
        request = BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=NO_END)
        found = scheduler.answer(request)
        with torch.inference_mode():
            copies = Copies(quick, prompt, beams)
            search = beam_search(copies.first, width=beams, max_tokens=40, end_ids=NO_END)
            assert list(found.token_ids) == search_over(copies, search, copies.first.device).ids
        again = scheduler.answer(replace(request, sampling=SamplingParams(max_tokens=3)))
        assert again.reused_tokens == len(prompt) - 1
        part = replace(request, on_text=lambda _text, count: lengths.append(count), cancelled=lambda: len(lengths) >= 5)
        cut = scheduler.answer(part)
        assert (cut.finish_reason, cut.generated_tokens) == ("cancelled", 5)
        _is_empty(scheduler)
