"""Batches: every row's answer is that of the row alone, whatever else is in the batch."""

import random
from collections.abc import Iterator
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.families import TABLE, family_of
from engine.jobs.rows import BatchOutcome
from engine.protocol import ChatMessage
from engine.runtime.batch.packed_sweep import balanced
from engine.runtime.batch.policy import BatchPolicy, can_pack
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import Sequence
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor, ContinuousBatch
from engine.runtime.schedule.request import BatchRequest
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone, rows_of
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import tiny_config

POLICY = BatchPolicy(rows=4, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25)


EVERY_FAMILY = sorted({*FAMILIES, *ADAPTED} - {"switch_transformers", "nllb-moe"})


TURNS = {
    *("doge", "longcat_flash", "qwen4_exp", "qwen4_exp_text"),
    *("inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text"),
}
"""Families whose rows are answered one by one, as far as the tiny models go."""


@cache
def _packs(family: str) -> bool:
    return family not in TURNS


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_rows_share_sweeps_in_all_families_but_a_few(family: str) -> None:
    executor = BatchExecutor(tiny_loaded(family), POLICY)
    assert bool(executor.note) == (not _packs(family))
    executor.close()


def _answers(
    loaded: LoadedModel, rows: list[BatchRequest], policy: BatchPolicy = POLICY
) -> dict[int, GenerationResult]:
    answers: dict[int, GenerationResult] = {}

    def take(answer: GenerationResult) -> None:
        assert answer.row not in answers
        answers[answer.row] = answer

    with closing(BatchExecutor(loaded, policy)) as executor:
        assert executor.run(iter(rows), take) is BatchOutcome.FINISHED
        batch = executor._batch
        if isinstance(batch, ContinuousBatch):
            assert batch.pool.held == 0
            executor.forget_prefixes()
            assert batch.pool.reserve(batch.pool.capacity)  # nothing is lost
    return answers


def _alone(loaded: LoadedModel, row: BatchRequest) -> tuple[int, ...]:
    return Alone(loaded).generate_from_ids(row.ids, row.sampling, end_ids=row.end_ids).token_ids


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", some(EVERY_FAMILY, first=1))
def test_greedy_answers_are_those_of_each_row_alone(family: str) -> None:
    if not _packs(family):
        pytest.skip("its rows are answered one by one")
    loaded = tiny_loaded(family)
    rows = rows_of([1, 5, 40, 17, 33, 70], 4)
    answers = _answers(loaded, rows)
    assert {row: answer.token_ids for row, answer in answers.items()} == {row.row: _alone(loaded, row) for row in rows}


@pytest.mark.parametrize("family", some(EVERY_FAMILY))
def test_windows_shorter_than_the_prompt_are_those_of_the_librarys_masks(family: str) -> None:
    config = tiny_config(family)
    text = config.get_text_config(decoder=True)
    if not family_of(text.model_type).packs_rows or not hasattr(text, "sliding_window") or family == "qwen3_vl_moe":
        pytest.skip("not packed, or its masks have no windows")
    windows: dict[str, object] = {"sliding_window": 11}
    if hasattr(text, "use_sliding_window"):
        windows["use_sliding_window"] = True
    if getattr(text, "layer_types", None):
        kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
        windows["layer_types"] = kinds[: text.num_hidden_layers]
    if text is not config:
        windows = {"text_config": {**{**FAMILIES, **ADAPTED}[family].get("text_config", {}), **windows}}
    loaded = tiny_loaded(family, **windows)
    assert can_pack(loaded.model)
    rows = rows_of([40, 3, 12], 4)
    found = {row: answer.token_ids for row, answer in _answers(loaded, rows).items()}
    assert found == {row.row: tuple(library_tokens(loaded.model, row.ids, 4)) for row in rows}


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", some(sorted(FAMILIES), first=2))
def test_logits_are_those_of_the_library(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _packs(family):
        pytest.skip("its rows are answered one by one")
    loaded = tiny_loaded(family)
    seen: dict[int, list[torch.Tensor]] = {}

    def choose(sequence: Sequence, logits: torch.Tensor) -> int:
        seen.setdefault(sequence.request.row, []).append(logits[0].clone())
        return int(logits.argmax())

    monkeypatch.setattr(Sequence, "choose", choose)
    rows = rows_of([9, 45], 4)
    for row, answer in _answers(loaded, rows).items():
        ids = torch.tensor([[*rows[row].ids, *answer.token_ids[:-1]]])
        with torch.inference_mode():
            wanted = loaded.model(input_ids=ids, use_cache=False).logits[0, len(rows[row].ids) - 1 :]
        assert (torch.stack(seen[row]) - wanted).abs().max() < 2e-3 * wanted.std()


def test_every_family_that_packs_is_tested() -> None:
    tested = {tiny_config(family).get_text_config(decoder=True).model_type for family in EVERY_FAMILY if _packs(family)}
    packs = {package: row.types or (package,) for package, row in TABLE.items() if row.packs_rows}
    assert [package for package, types in packs.items() if tested.isdisjoint(types)] == []


def test_rows_with_a_common_beginning_share_its_pages(mixtral: LoadedModel) -> None:
    common = random_prompt(80)
    rows = [
        BatchRequest(
            row, ids=(*common, *random_prompt(1 + row, seed=row)), sampling=SamplingParams(max_tokens=5), end_ids=NO_END
        )
        for row in range(9)
    ]
    answers = _answers(mixtral, rows)
    assert {row: answer.token_ids for row, answer in answers.items()} == {row.row: _alone(mixtral, row) for row in rows}
    assert sorted(answer.reused_tokens for answer in answers.values()) == [0, *[64] * 8]


def test_a_seed_gives_the_same_answer_in_every_batch(mixtral: LoadedModel) -> None:
    lengths = [random.randint(1, 60) for _ in range(12)]
    rows = [
        BatchRequest(
            row.row, ids=row.ids, end_ids=NO_END, sampling=SamplingParams(0.9, top_k=20, seed=row.row, max_tokens=12)
        )
        for row in rows_of(lengths, SamplingParams().max_tokens)
    ]
    tokens = {row: answer.token_ids for row, answer in _answers(mixtral, rows).items()}
    shuffled = random.sample(rows, len(rows))
    other = _answers(mixtral, shuffled, BatchPolicy(rows=12, kv_bytes=2**22, sweep_tokens=200))
    assert {row: answer.token_ids for row, answer in other.items()} == tokens
    assert tokens == {row.row: _alone(mixtral, row) for row in rows}


def test_a_batch_gives_way_within_a_layer_and_goes_on(mixtral: LoadedModel) -> None:
    rows = rows_of([20, 35, 3, 50, 8], 9)
    wanted = {row: answer.token_ids for row, answer in _answers(mixtral, rows).items()}
    executor = BatchExecutor(mixtral, POLICY)
    answers: dict[int, tuple[int, ...]] = {}
    source, chat = iter(rows), Alone(mixtral)
    asked = 0

    def every_third() -> bool:
        nonlocal asked
        asked += 1
        return asked % 3 == 0

    rounds = 0
    while (
        outcome := executor.run(source, lambda a: answers.__setitem__(a.row, a.token_ids), every_third)
    ) is not BatchOutcome.FINISHED:
        assert outcome is BatchOutcome.YIELDED
        assert asked % 3 == 0  # at once
        rounds += 1
        chat.generate_from_ids(random_prompt(4), SamplingParams(max_tokens=2))
    executor.close()
    assert rounds > 20
    assert answers == wanted


def test_a_cancelled_batch_stops_at_once_and_lets_go_of_its_pages(mixtral: LoadedModel) -> None:
    executor = BatchExecutor(mixtral, POLICY)
    asked: list[int] = []
    outcome = executor.run(
        iter(rows_of([20] * 10, 50)),
        pytest.fail,
        cancelled=lambda: len(asked) >= 7 or asked.append(0) is not None,
    )
    assert outcome is BatchOutcome.CANCELLED
    assert len(asked) == 7
    batch = executor._batch
    assert isinstance(batch, ContinuousBatch)
    assert (batch.pool.held, batch.rows) == (0, [])
    executor.close()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_a_batch_can_be_stopped_while_a_template_is_rendered(family: str) -> None:
    loaded = tiny_loaded(family)
    endless = copy(loaded.tokenizer)
    endless.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    executor = BatchExecutor(replace(loaded, tokenizer=endless))
    asked: list[int] = []
    rows = iter([BatchRequest(0, messages=(ChatMessage("user", "a"),), sampling=SamplingParams())])
    outcome = executor.run(rows, lambda _answer: None, cancelled=lambda: len(asked) >= 4 or asked.append(0) is not None)
    executor.close()
    assert outcome is BatchOutcome.CANCELLED


def test_thousands_of_queued_rows_are_asked_for_as_places_come_free(mixtral: LoadedModel) -> None:
    given_out = answered = 0
    ahead: list[int] = []

    def stream() -> Iterator[BatchRequest]:
        nonlocal given_out
        for row in rows_of([3] * 2_000, 1):
            given_out += 1
            ahead.append(given_out - answered)
            yield row

    def take(_: GenerationResult) -> None:
        nonlocal answered
        answered += 1

    executor = BatchExecutor(mixtral, BatchPolicy(rows=64, kv_bytes=2**20, sweep_tokens=512))
    executor.run(stream(), take)
    batch = executor._batch
    assert isinstance(batch, ContinuousBatch)
    assert answered == 2_000
    assert max(ahead) <= 65
    executor.close()


def test_rows_wait_for_pages_and_one_that_never_fits_is_told(mixtral: LoadedModel) -> None:
    rows = rows_of([40, 200, 40, 40, 40], 6)
    executor = BatchExecutor(mixtral, POLICY)
    model = executor._batch.model  # type: ignore[union-attr]
    executor._batch = batch = ContinuousBatch(model, POLICY, most_pages=5)
    answers: dict[int, GenerationResult] = {}
    executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, answer))
    executor.close()
    assert batch.most_rows == 2
    failed = answers.pop(1)
    assert failed.error.code is ErrorCode.PROMPT_TOO_LONG
    assert {row: answer.token_ids for row, answer in answers.items()} == {
        row.row: _alone(mixtral, row) for row in rows if row.row != 1
    }


def test_what_is_wrong_with_a_row_is_its_own_answer(mixtral: LoadedModel) -> None:
    messages = (ChatMessage("user", "Hello"),)
    rows = [
        BatchRequest(0, sampling=SamplingParams(max_tokens=2)),
        BatchRequest(1, ids=tuple(random_prompt(256))),
        BatchRequest(2, messages, sampling=SamplingParams(beams=2)),
        BatchRequest(3, messages, sampling=SamplingParams(max_tokens=3)),
        BatchRequest(4, ids=tuple(random_prompt(250)), end_ids=NO_END),
    ]
    answers = _answers(mixtral, rows)
    codes = {row: answer.error.code for row, answer in answers.items() if answer.error is not None}
    assert codes == {0: ErrorCode.INVALID_REQUEST, 1: ErrorCode.PROMPT_TOO_LONG, 2: ErrorCode.INVALID_REQUEST}
    assert answers[3].text == Alone(mixtral).generate(messages, SamplingParams(max_tokens=3)).text
    assert (answers[4].finish_reason, answers[4].generated_tokens) == ("context", 6)


def test_repetition_penalties_stop_strings_and_constraints_are_each_rows_own(mixtral: LoadedModel) -> None:
    class OnlyEven:
        def restrict(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(0, torch.arange(1, logits.shape[0], 2), float("-inf"))

        def accept(self, token_id: int) -> bool:
            return token_id % 10 == 0

    plain = rows_of([20], 30)[0]
    text = _answers(mixtral, [plain])[0].text
    rows = [
        plain,
        BatchRequest(1, ids=plain.ids, end_ids=NO_END, sampling=SamplingParams(max_tokens=30, repetition_penalty=1.8)),
        BatchRequest(2, ids=plain.ids, end_ids=NO_END, sampling=SamplingParams(max_tokens=30, stop=(text[3:5],))),
        BatchRequest(3, ids=plain.ids, end_ids=NO_END, sampling=SamplingParams(max_tokens=30), constraint=OnlyEven()),
    ]
    answers = _answers(mixtral, rows)
    for row in rows[:3]:
        assert answers[row.row].token_ids == _alone(mixtral, row)
    assert answers[2].finish_reason == "stop_string"
    assert answers[2].text == text[: text.index(text[3:5])]
    even = answers[3].token_ids
    assert not any(token % 2 for token in even)
    assert len(even) == 30 or even[-1] % 10 == 0


def test_a_window_as_long_as_the_rows_changes_nothing_and_a_short_one_does() -> None:
    loaded = tiny_loaded("llama")
    rows = rows_of([60, 90], 8)
    wanted = {row.row: _alone(loaded, row) for row in rows}
    for window, same in ((120, True), (8, False)):
        policy = BatchPolicy(rows=4, kv_bytes=2**22, window=window, kept=4)
        found = {row: answer.token_ids for row, answer in _answers(loaded, rows, policy).items()}
        assert (found == wanted) is same


def test_a_batch_is_recorded_as_steps_of_one_request(mixtral: LoadedModel) -> None:
    RECORDER.start()
    try:
        _answers(mixtral, rows_of([5, 7], 3))
        steps = RECORDER.take_steps()
    finally:
        RECORDER.stop()
    assert steps["tokens"][steps["name"] == lanes.BATCH_STEP].tolist() == [12, 2, 2]


def test_other_families_are_answered_one_by_one_with_a_word_about_it() -> None:
    loaded = tiny_loaded("doge")
    rows = rows_of([5, 12], 4)
    executor = BatchExecutor(loaded)
    assert "one by one" in executor.note
    executor.close()
    answers = _answers(loaded, rows)
    assert {row: answer.token_ids for row, answer in answers.items()} == {row.row: _alone(loaded, row) for row in rows}


class _Spelling:
    """Each token is one more than the one before, beginning with `first`; three of them are enough."""

    def __init__(self, first: int) -> None:
        self._first = self._next = first

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(logits, float("-inf"))
        only[self._next] = logits[self._next]
        return only

    def accept(self, token_id: int) -> bool:
        assert token_id == self._next
        self._next += 1
        return self._next == self._first + 3


def test_one_by_one_answers_keep_to_their_constraints_even_if_they_had_to_give_way() -> None:
    loaded = tiny_loaded("doge")
    rows = [replace(row, constraint=_Spelling(10 + row.row)) for row in rows_of([5, 12], 9)]
    answers: dict[int, GenerationResult] = {}
    executor, source, looks = BatchExecutor(loaded), iter(rows), iter(range(3))
    try:
        outcome = executor.run(
            source, lambda answer: answers.__setitem__(answer.row, answer), lambda: next(looks, None) is None
        )
        assert outcome is BatchOutcome.YIELDED
        assert not answers
        executor.run(source, lambda answer: answers.__setitem__(answer.row, answer))
    finally:
        executor.close()
    assert {row: answer.token_ids for row, answer in answers.items()} == {0: (10, 11, 12), 1: (11, 12, 13)}
    assert {answer.finish_reason for answer in answers.values()} == {"stop"}


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
@settings(max_examples=100)
def test_balanced_micro_batches(lengths: list[int], count: int) -> None:
    parts = balanced(lengths, count)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) == min(count, len(lengths))
    if len(parts) == count:
        # The longest one goes first, so no other is ahead of it by more than one row.
        sums = [sum(lengths[row] for row in part) for part in parts]
        assert max(sums) - min(sums) <= max(lengths)
