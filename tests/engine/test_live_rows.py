"""Rows of clients that come, watch and go: streamed, cancelled alone, and moved aside when pages run short."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.jobs.rows import BatchOutcome
from engine.kernels.native.paged_attention import PAGE_TOKENS
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import ChanceLog, GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor, ContinuousBatch
from engine.runtime.schedule.request import BatchRequest
from tests.engine.loaded_tiny import NO_END, random_prompt
from tests.engine.single_streams import Alone

POLICY = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25, ahead=3)


def _batch(executor: BatchExecutor) -> ContinuousBatch:
    assert isinstance(executor._batch, ContinuousBatch)
    return executor._batch


def _small(loaded: LoadedModel, pages: int) -> BatchExecutor:
    executor = BatchExecutor(loaded, POLICY)
    executor._batch = ContinuousBatch(_batch(executor).model, POLICY, most_pages=pages)
    return executor


@settings(max_examples=3, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 45), st.integers(0, 40), st.integers(1, 40)),
        min_size=1,
        max_size=9,
    ),
    pages=st.integers(7, 14),
    seed=st.integers(0, 99),
)
def test_rows_that_step_aside_are_answered_as_if_alone(
    mixtral: LoadedModel, rows: list[tuple[int, int, int, int]], pages: int, seed: int
) -> None:
    """(prompt, answer, tokens before it is cancelled or 0, prompt's seed): every row ends once, no page is lost."""
    executor, answers, watched = _small(mixtral, pages), dict[int, GenerationResult](), dict[int, list[int]]()

    def request(number: int, prompt: int, most: int, cancel_after: int, text: int) -> BatchRequest:
        watched[number] = []
        return BatchRequest(
            number,
            ids=tuple(random_prompt(prompt, seed=seed + text % 3)),
            sampling=SamplingParams(max_tokens=most),
            end_ids=NO_END,
            on_text=lambda _text, count: watched[number].append(count),
            cancelled=lambda: bool(cancel_after) and len(watched[number]) >= cancel_after,
        )

    requests = [request(number, *row) for number, row in enumerate(rows)]

    def take(answer: GenerationResult) -> None:
        assert answer.row not in answers
        answers[answer.row] = answer

    assert executor.run(iter(requests), take) is BatchOutcome.FINISHED
    batch = _batch(executor)
    assert (batch.pool.held, len(answers)) == (0, len(rows))
    assert batch.pool.reserve(batch.pool.capacity)
    executor.close()
    session = Alone(mixtral)
    for number, (prompt, most, cancel_after, _text) in enumerate(rows):
        answer, room = answers[number], pages * PAGE_TOKENS - prompt
        alone = session.generate_from_ids(requests[number].ids, requests[number].sampling, end_ids=NO_END)
        # The last token of an answer needs no room.
        count = min(most, cancel_after or most, room + 1)
        assert answer.token_ids == alone.token_ids[:count]
        if cancel_after and cancel_after < min(most, room + 1):
            assert answer.finish_reason == "cancelled"
        elif most > room + 1:
            assert answer.error.code is ErrorCode.NOT_ENOUGH_MEMORY
        elif count == most:
            assert answer.finish_reason == "length"
        assert watched[number] == list(range(1, count + 1))
        assert answer.prompt_tokens == prompt


def test_rows_do_step_aside(mixtral: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.runtime.schedule.row import PagedRow

    aside = list[int]()
    step = PagedRow.step_aside
    monkeypatch.setattr(PagedRow, "step_aside", lambda row: (aside.append(row.request.row), step(row))[1])
    executor, answers = _small(mixtral, 6), dict[int, GenerationResult]()
    rows = [
        BatchRequest(n, ids=tuple(random_prompt(20, seed=n)), sampling=SamplingParams(max_tokens=60), end_ids=NO_END)
        for n in range(3)
    ]
    executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, answer))
    executor.close()
    assert aside
    assert not any(answer.reused_tokens for answer in answers.values())  # what a row reads again is its own
    assert 0 not in aside  # the oldest never does
    assert all(len(answer.token_ids) == 60 for answer in answers.values())


def test_the_next_turn_shares_the_pages_of_the_answer_before(mixtral: LoadedModel) -> None:
    executor, answers = BatchExecutor(mixtral, POLICY), dict[int, GenerationResult]()

    def ask(number: int, ids: list[int]) -> GenerationResult:
        row = BatchRequest(number, ids=tuple(ids), sampling=SamplingParams(max_tokens=40), end_ids=NO_END)
        executor.run(iter([row]), lambda answer: answers.__setitem__(answer.row, answer))
        return answers[number]

    prompt = random_prompt(30)
    first = ask(0, prompt)
    turn = [*prompt, *first.token_ids, *random_prompt(9, seed=5)]
    second = ask(1, turn)
    executor.close()
    # The answer's last token was never read.
    assert second.reused_tokens == (30 + 39) // PAGE_TOKENS * PAGE_TOKENS
    alone = Alone(mixtral).generate_from_ids(turn, SamplingParams(max_tokens=40), end_ids=NO_END)
    assert second.token_ids == alone.token_ids


def test_chances_biases_and_openais_penalties(mixtral: LoadedModel) -> None:
    ids = random_prompt(12)
    plain = Alone(mixtral).generate_from_ids(ids, SamplingParams(max_tokens=6), end_ids=NO_END)
    log = ChanceLog(3)
    logged = Alone(mixtral).generate_from_ids(ids, SamplingParams(max_tokens=6), end_ids=NO_END, chances=log)
    assert logged.token_ids == plain.token_ids
    for token, chances in zip(plain.token_ids, log.tokens, strict=True):
        assert chances.token_id == chances.likeliest[0][0] == token
        assert chances.logprob == chances.likeliest[0][1] <= 0
        assert [value for _, value in chances.likeliest] == sorted((v for _, v in chances.likeliest), reverse=True)
    away = SamplingParams(max_tokens=6, logit_bias=((plain.token_ids[0], -100.0), (10**6, 5.0)))
    assert plain.token_ids[0] not in Alone(mixtral).generate_from_ids(ids, away, end_ids=NO_END).token_ids
    always = SamplingParams(max_tokens=6, logit_bias=((7, 100.0),))
    assert Alone(mixtral).generate_from_ids(ids, always, end_ids=NO_END).token_ids == (7,) * 6


@given(st.lists(st.integers(0, 30), max_size=20), st.floats(-2, 2), st.floats(-2, 2))
def test_openais_penalties_are_as_its_page_writes_them(ids: list[int], presence: float, frequency: float) -> None:
    from engine.runtime.decode.sampling import penalise_presence

    logits = torch.randn(1, 31)
    sampling = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    changed = penalise_presence(logits, torch.tensor(ids, dtype=torch.long), sampling)
    for token in range(31):
        count = ids.count(token)
        expected = float(logits[0, token]) - count * frequency - (count > 0) * presence
        assert abs(float(changed[0, token]) - expected) < 1e-4
