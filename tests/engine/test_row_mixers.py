"""Families whose mixers go row by row: chats and rows of a file in the same sweeps say what each says alone."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.jobs.rows import BatchOutcome, never
from engine.kernels.native.build import library_path
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.left_pages import Partings
from engine.runtime.schedule.request import BatchRequest, Preparation
from engine.runtime.schedule.scheduler import Scheduler
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, open_model, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint

FAMILIES = [
    "qwen3_next",  # gated delta nets
    "lfm2_moe",  # short convolutions
    "nemotron_h",  # Mamba 2
    "jamba",  # Mamba
    "minimax",  # linear attention
    "kimi_linear",  # a delta rule with a decay for each channel, and latents
    "deepseek_v32",  # tokens chosen by an index
    "glm_moe_dsa",  # what one layer has chosen, the next one attends to
    "deepseek_v4",  # what lies behind is compressed
    "zaya",  # the last tokens' keys and values, mixed: no pages hold these
    "llama4_text",  # chunks
    "gemma4_text",  # keys and values of other layers
]
POLICY = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25)


@cache
def _loaded(family: str) -> LoadedModel:
    return tiny_loaded(family)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return _loaded(request.param)


def _asked(chance: random.Random, number: int, beginnings: list[list[int]]) -> BatchRequest:
    """A request with a sampler of its own, and perhaps the beginning of another's prompt."""
    begins = chance.choice([[], *beginnings])
    ids = (*begins, *random_prompt(chance.randint(1, 30), seed=chance.randrange(10_000)))
    kinds = [
        SamplingParams(),
        SamplingParams(0.8, top_k=20, seed=number),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.5),
    ]
    sampling = replace(chance.choice(kinds), max_tokens=chance.randint(1, 7))
    return BatchRequest(number, ids=ids, sampling=sampling, end_ids=NO_END)


def _alone(loaded: LoadedModel, asked: BatchRequest) -> tuple[int, ...]:
    return Alone(loaded).generate_from_ids(asked.ids, asked.sampling, end_ids=NO_END).token_ids


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("loaded", some(FAMILIES, every=4), indirect=True)
@pytest.mark.parametrize("seed", range(2))
def test_rows_that_are_interrupted_and_short_of_memory_are_as_alone(loaded: LoadedModel, seed: int) -> None:
    chance = random.Random(seed)
    beginnings = [random_prompt(n, seed=n) for n in (33, 47)]
    rows = [_asked(chance, number, beginnings) for number in range(9)]
    policy = BatchPolicy(rows=4, kv_bytes=2**22, sweep_tokens=40, micro_batch_tokens=25, ahead=2)
    model = PackedModel(loaded, policy)
    # Room for two of the longest.
    beside = 2 * -(-model.state_bytes // model.page_bytes)
    batch = ContinuousBatch(model, policy, most_pages=2 * (4 + beside))
    answers = dict[int, GenerationResult]()
    prepared, chat = Preparation(loaded).rows(iter(rows), pytest.fail, never), Alone(loaded)

    def take(answer: GenerationResult) -> None:
        answers[answer.row] = answer

    with torch.inference_mode():
        while (outcome := batch.run(prepared, take, lambda: chance.random() < 0.2, never)) is BatchOutcome.YIELDED:
            chat.generate_from_ids(random_prompt(4), SamplingParams(max_tokens=1))
    assert outcome is BatchOutcome.FINISHED
    assert batch.pool.held == batch.pool.held_states == 0
    assert batch.pool.reserve(batch.pool.capacity)  # nothing is lost
    batch.free()
    assert {row: answer.token_ids for row, answer in answers.items()} == {row.row: _alone(loaded, row) for row in rows}


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("loaded", some(FAMILIES, every=4, first=1), indirect=True)
def test_chats_and_the_rows_of_a_file_are_as_alone(loaded: LoadedModel) -> None:
    chance = random.Random(3)
    beginnings = [random_prompt(40, seed=5)]
    chats = [_asked(chance, number, beginnings) for number in range(4)]
    rows = [_asked(chance, number, beginnings) for number in range(4)]
    scheduler, executor = Scheduler(loaded), BatchExecutor(loaded, POLICY)
    said, answers = dict[int, object](), dict[int, GenerationResult]()
    coming = list(chats)

    def arrive() -> bool:
        if coming and chance.random() < 0.3:
            asked = coming.pop()
            scheduler.submit(asked, lambda outcome, row=asked.row: said.__setitem__(row, outcome))  # type: ignore[misc]
        return scheduler.is_due()

    source = iter(rows)
    while executor.run(source, lambda answer: answers.__setitem__(answer.row, answer), arrive) is BatchOutcome.YIELDED:
        scheduler.share(lambda: False)
    while coming or scheduler.is_busy:
        arrive()
        scheduler.serve()
    executor.close()
    scheduler.close()
    for asked in chats:
        outcome = said[asked.row]
        assert outcome.token_ids == _alone(loaded, asked)  # type: ignore[attr-defined]
    assert {row: answer.token_ids for row, answer in answers.items()} == {row.row: _alone(loaded, row) for row in rows}


@pytest.mark.takes_turns(4)
def test_rows_that_begin_alike_read_that_once(loaded: LoadedModel) -> None:
    common = random_prompt(80)
    rows = [
        BatchRequest(
            n, ids=(*common, *random_prompt(1 + n, seed=n)), sampling=SamplingParams(max_tokens=3), end_ids=NO_END
        )
        for n in range(6)
    ]
    executor, answers = BatchExecutor(loaded, POLICY), dict[int, GenerationResult]()
    executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, answer))
    executor.close()
    assert {row: answer.token_ids for row, answer in answers.items()} == {row.row: _alone(loaded, row) for row in rows}
    shared = sorted(answer.reused_tokens for answer in answers.values())
    assert shared[0] == 0
    assert all(64 <= tokens <= 86 for tokens in shared[1:])  # of pages, whole ones or those with a state


@pytest.mark.takes_turns(4)
def test_what_a_chat_has_read_is_there_for_its_next_turn(loaded: LoadedModel) -> None:
    executor, answers = BatchExecutor(loaded, POLICY), list[GenerationResult]()
    first = BatchRequest(0, ids=tuple(random_prompt(50)), sampling=SamplingParams(max_tokens=8), end_ids=NO_END)
    executor.run(iter([first]), answers.append)
    turn = (*first.ids, *answers[0].token_ids, *random_prompt(7, seed=3))
    second = BatchRequest(1, ids=turn, sampling=SamplingParams(max_tokens=4), end_ids=NO_END)
    executor.run(iter([second]), answers.append)
    executor.close()
    # The last token of an answer is never read, and the last page of a row only shared with its state.
    pages = ("llama4_text", "gemma4_text", "deepseek_v32", "glm_moe_dsa", "deepseek_v4")
    has_only_pages = loaded.model.config.model_type in pages
    assert answers[1].reused_tokens == (32 if has_only_pages else 57)
    assert answers[1].token_ids == _alone(loaded, second)


class _Row:
    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.held = prompt, 0


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 40),
)
def test_nobody_waits_for_ever_for_what_others_read(shapes: list[tuple[int, int, int]], most: int) -> None:
    partings, left = Partings(), set[tuple[int, ...]]()
    rows = [
        _Row([*random_prompt(60, seed=kind)[:common], *random_prompt(own, seed=n + 10)])
        for n, (kind, common, own) in enumerate(shapes)
    ]
    begun, sweeps = set[int](), 0
    while any(row.held < len(row.prompt) for row in rows):
        readers, budget = list[_Row](), most
        for number, row in enumerate(rows):
            if row.held >= len(row.prompt):
                continue
            if number not in begun:
                if partings.waits(row, readers):
                    continue
                begun.add(number)
                row.held = max((len(each) for each in left if each == tuple(row.prompt[:-1][: len(each)])), default=0)
            readers.append(row)
        advanced = 0
        for row in readers:
            tokens = partings.up_to(row, min(budget, len(row.prompt) - row.held))
            budget -= tokens
            row.held += tokens
            advanced += tokens
            if partings.ends(row, row.held):
                assert 32 <= row.held < len(row.prompt)
                left.add(tuple(row.prompt[: row.held]))
        assert advanced
        sweeps += 1
        assert sweeps < 2_000


@pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_sampled_answers_of_delta_nets_in_bf16_are_those_of_a_file_of_one_row(family: str, tmp_path: Path) -> None:
    loaded = open_model(tiny_checkpoint(family, tmp_path), threads=2)
    rows = [
        BatchRequest(
            n,
            ids=tuple(random_prompt(9 + n, seed=n)),
            sampling=SamplingParams(0.9, seed=n, max_tokens=12),
            end_ids=NO_END,
        )
        for n in range(5)
    ]

    def answered(some: list[BatchRequest], policy: BatchPolicy) -> dict[int, tuple[int, ...]]:
        executor, answers = BatchExecutor(loaded, policy), dict[int, tuple[int, ...]]()
        executor.run(iter(some), lambda answer: answers.__setitem__(answer.row, answer.token_ids))
        executor.close()
        return answers

    try:
        together = answered(rows, POLICY)
        alone = {row: tokens for each in rows for row, tokens in answered([each], POLICY).items()}
        assert together == alone
    finally:
        loaded.close()
