"""Models whose layers sum up what they read, or forget it behind a window, over pages of one pool: alone, in company,
forked, guessed, kept.

Each answer is held to that of the model's own cache, which other tests hold to transformers, and once to transformers.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.jobs.rows import BatchOutcome
from engine.kernels.native.build import library_path
from engine.kernels.native.library import load_kernels
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode import speculation
from engine.runtime.decode.beam_search import beam_search
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.paged_steps import PagedSteps
from engine.runtime.decode.speculation import Guess
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prefix_cache.blocks import BlockLayout
from engine.runtime.prefix_cache.files import SpillFiles
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from engine.runtime.schedule.executor import AHEAD_TOKENS, BatchExecutor
from engine.runtime.schedule.request import BatchRequest, Outcome
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, library_tokens, open_model, random_prompt, spread, tiny_loaded
from tests.engine.single_streams import Alone, search_over
from tests.engine.test_background import Job, row, serve
from tests.engine.test_kept_prefixes import (
    ROOT,
    A,
    B,
    ask,
    assert_same_but_for_a_near_tie,
    files_in,
    fresh,
    further,
)
from tests.engine.test_scheduler import Copies
from tests.engine.test_speculation import Eager
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = [
    pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here"),
    pytest.mark.takes_turns(4),
]

NATIVE = (
    *("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "kimi_linear"),
    *("lfm2_moe", "granitemoehybrid", "nemotron_h", "gpt_oss", "gemma3_text"),
)
WINDOWED = ("gpt_oss", "gemma3_text", "gemma4_text", "deepseek_v4")
FAMILIES = [
    "qwen3_next",
    "qwen3_5_moe_text",
    pytest.param("qwen3_5_text", marks=pytest.mark.exhaustive),
    "kimi_linear",  # decays for each key, beside latents
    "lfm2_moe",  # short convolutions alone
    "granitemoehybrid",  # Mamba 2
    "nemotron_h",  # and layers that keep nothing
    "gpt_oss",  # every other layer has a window
    pytest.param("gemma3_text", marks=pytest.mark.exhaustive),
    "gemma4_text",  # from here on by the library: another one with windows
    "deepseek_v4",  # and one that compresses what lies behind them
    "minimax",  # linear attention without convolutions
    *(
        pytest.param(family, marks=pytest.mark.exhaustive)
        for family in ("jamba", "bailing_hybrid", "lara_mini", "glm5_next_text")
    ),
]


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    lengths = {"max_position_embeddings": 2048}
    lengths |= {"sliding_window": 40} if request.param in WINDOWED else {}
    if request.param not in NATIVE:  # in 32 bits: the library rounds prompts that are read in other pieces otherwise
        chooses = request.param in ("glm5_next_text", "deepseek_v4")
        index = {"index_topk": 32, "index_n_heads": 32} if chooses else {}
        rates = {"compressed_sparse_attention": 5, "heavily_compressed_attention": 48}  # runs beyond window and page
        runs = {"compress_rates": rates} if request.param == "deepseek_v4" else {}
        model = tiny_loaded(request.param, context_tokens=2048, **lengths, **index, **runs)
        model.kernels = load_kernels(threads=1)
        yield model
        return

    folder = tmp_path_factory.mktemp("states") / "model"
    path = tiny_checkpoint(request.param, folder, prepare=spread, **lengths)
    model = open_model(path, speculation="text")
    model.kept = None
    yield model
    model.close()


def lane_of(scheduler: Scheduler) -> ContinuousBatch:
    """Where all requests are answered."""
    lane = scheduler._batch
    assert lane.exact is not None
    return lane


def close(scheduler: Scheduler) -> None:
    """Nothing is lost."""
    lane = lane_of(scheduler)
    lane._left.give_up()
    assert (lane.pool.held, lane.pool.held_states, lane.pool.held_windows, lane.pool.in_use) == (0, 0, 0, 0)
    assert lane.pool.reserve(lane.pool.capacity)
    scheduler.close()


def test_tokens_are_those_of_transformers(loaded: LoadedModel) -> None:
    scheduler, prompt = Scheduler(loaded), random_prompt(70)
    (result,) = ask(scheduler, prompt, tokens=40, chat="")
    lane_of(scheduler)
    with torch.inference_mode():
        wanted = tuple(library_tokens(loaded.model, prompt, 40))
    assert_same_but_for_a_near_tie(loaded, prompt, result.token_ids, wanted)
    assert result.token_ids == fresh(loaded, prompt, 40)
    close(scheduler)


_SHAPES = st.tuples(st.integers(1, 90), st.integers(1, 30), st.sampled_from([1, 1, 1, 2, 3, 9]), st.integers(0, 12))


@settings(max_examples=2, deadline=None)
@given(company=st.lists(_SHAPES, min_size=2, max_size=5), spare=st.integers(0, 30), tries=st.booleans())
def test_an_answer_in_company_is_what_it_is_alone(
    loaded: LoadedModel, company: list[tuple[int, int, int, int]], spare: int, tries: bool
) -> None:
    """However they come, step aside, guess, search and begin alike; else they are refused."""
    scheduler, ends = Scheduler(loaded), dict[int, Outcome]()
    pool = lane_of(scheduler).pool
    scheduler._batch = lane = ContinuousBatch(
        lane_of(scheduler).model, lane_of(scheduler)._policy, 8 + 6 * pool.state_weight + spare, keeps=True, exact=True
    )
    if tries:
        lane._prices = Eager()

    def request(number: int) -> BatchRequest:
        prompt, most, beams, _ = company[number]
        ids = [*random_prompt(min(prompt, 40), seed=1), *random_prompt(max(0, prompt - 40), seed=number)]
        sampling = SamplingParams(max_tokens=most, beams=beams)
        return BatchRequest(0, ids=tuple(ids), sampling=sampling, end_ids=NO_END)

    looks, waiting = 0, sorted(range(len(company)), key=lambda number: company[number][3])

    def arrive() -> bool:
        nonlocal looks
        looks += 1
        while waiting and company[waiting[0]][3] <= looks:
            number = waiting.pop(0)
            scheduler.submit(request(number), partial(ends.__setitem__, number))
        return False

    while waiting or scheduler.is_busy:
        arrive()
        scheduler.serve(arrive)
    for number, (prompt, most, beams, _) in enumerate(company):
        end = ends[number]
        if isinstance(end, EngineError):
            assert end.code is ErrorCode.NOT_ENOUGH_MEMORY
            assert (prompt + most) // 32 + 2 + beams * (2 + most // 32 + 2 * pool.state_weight) > 8 + spare
            continue
        assert isinstance(end, GenerationResult)
        if beams == 1:
            wanted = Alone(loaded).answer(request(number)).token_ids
            assert_same_but_for_a_near_tie(loaded, request(number).ids, end.token_ids, wanted)
        else:  # which beams go on may be a near tie, and what follows another search: alone, below, they are the same
            assert len(end.token_ids) == most
    close(scheduler)


def searched(loaded: LoadedModel, prompt: Sequence[int], beams: int, most: int) -> list[int]:
    """What a search finds whose beams have a cache each."""
    with torch.inference_mode():
        copies = Copies(loaded, list(prompt), beams)
        search = beam_search(copies.first, width=beams, max_tokens=most, end_ids=NO_END)
        return search_over(copies, search, copies.first.device).ids


def test_guesses_change_nothing_and_what_did_not_come_true_leaves_no_trace(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(20 + 30 * n, seed=n) for n in range(3)]
    answers = [fresh(loaded, prompt, 40) for prompt in prompts]
    Foreseeing.texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    monkeypatch.setattr(speculation, "PromptLookup", Foreseeing)
    scheduler = Scheduler(loaded)
    lane_of(scheduler)._prices = Eager()
    results = ask(scheduler, prompts[0], tokens=40, chat="") + ask(scheduler, *prompts, tokens=40, chat="")
    for answer, result in zip([answers[0], *answers], results, strict=True):
        assert_same_but_for_a_near_tie(loaded, prompts[answers.index(answer)], result.token_ids, answer)
    assert results[0].token_ids == answers[0]
    exact = lane_of(scheduler).exact
    if exact is not None and exact.is_native:  # nothing is guessed where the library computes steps
        assert all(result.guessed_tokens > result.accepted_tokens > 0 for result in results[:1])
    close(scheduler)


class Foreseeing:
    """Guesses what an answer is going to be, and something else behind that."""

    texts: ClassVar[list[list[int]]] = []
    takes_s = 0.0

    def __init__(self, prefix: Sequence[int]) -> None:
        self._ids = list(prefix)

    def append(self, token_id: int) -> None:
        self._ids.append(token_id)

    def hopes(self) -> float:
        return 0.9

    def learn(self, guess: Guess, came_true: int) -> None:
        """It has."""

    def guess(self, most: int) -> Guess | None:
        held = len(self._ids)
        text = next((each for each in self.texts if each[:held] == self._ids), None)
        if text is None or held % 5 == 0:
            return None
        ids = [*text[held : held + held % 3], 5, 6][:most]
        return Guess(tuple(ids), (0.9,) * len(ids), (0,) * len(ids))


def test_beams_go_on_from_states_of_others(loaded: LoadedModel) -> None:
    for beams in (3, 9):  # more than one step takes
        scheduler, prompt = Scheduler(loaded), random_prompt(45)
        sampling = SamplingParams(max_tokens=30, beams=beams)
        found = scheduler.answer(BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=NO_END))
        assert list(found.token_ids) == searched(loaded, prompt, beams, 30)
        close(scheduler)


def test_a_prompt_goes_on_from_the_nearest_state(loaded: LoadedModel) -> None:
    """Where an answer ended, shortly before it began, or far back in a long prompt; with a window also where prompts
    were seen to part, and in the midst of a page."""
    loaded.kept = kept = PrefixCache(ROOT, 2**26)
    scheduler = Scheduler(loaded)
    has_window = lane_of(scheduler).pool.windows > 0
    (first,) = ask(scheduler, A, chat="")
    ask(scheduler, B, chat="")
    turn = further(A, first)
    (second,) = ask(scheduler, turn, chat="")
    assert second.token_ids == fresh(loaded, turn)
    assert second.reused_tokens == len(A) + 7  # the last token was never read
    edited = [*A[:-4], *random_prompt(30, seed=4)]
    (third,) = ask(scheduler, edited, chat="")
    assert third.token_ids == fresh(loaded, edited)
    assert third.reused_tokens == (len(A) - 4 if has_window else (len(A) - 16) // 32 * 32)
    (again,) = ask(scheduler, A, chat="")
    assert again.token_ids == first.token_ids
    assert again.reused_tokens == (len(A) - 1 if has_window else (len(A) - 16) // 32 * 32)
    long = random_prompt(1400, seed=6)
    for seed, found in ((7, 0), (8, 1024), (9, len(long) if has_window else 1376)):
        prompt = [*long, *random_prompt(90, seed=seed)]
        (result,) = ask(scheduler, prompt, chat="")
        assert result.token_ids == fresh(loaded, prompt)
        assert result.reused_tokens == found
    close(scheduler)
    kept.close()
    loaded.kept = None


@pytest.mark.takes_turns(1)
@pytest.mark.parametrize("damage", ["none", "state", "every state", "block"])
def test_a_chat_goes_on_after_a_restart(
    loaded: LoadedModel, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last state whose file is sound."""
    tokens, write = dict[str, int](), SpillFiles.write

    def noting(files: SpillFiles, path: Path, chat: str, key: bytes, description: bytes, data: memoryview) -> None:
        layout = BlockLayout.read(description)
        assert layout is not None
        tokens[path.stem] = layout.tokens
        if has_window and layout.layers[0]:
            tokens[path.stem] = whole  # of the first layer, which has a window: what is seen from there
        write(files, path, chat, key, description, data)

    monkeypatch.setattr(SpillFiles, "write", noting)
    loaded.kept = kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler, whole = Scheduler(loaded), 192
    has_window = lane_of(scheduler).pool.windows > 0
    (first,) = ask(scheduler, A)
    assert kept.settle(30)
    close(scheduler)
    kept.close()
    end, middle = (whole, 0) if has_window else (len(A) + 7, (len(A) - 16) // 32 * 32)
    assert set(tokens.values()) == {0, middle, end}
    least = {"none": end + 1, "state": end, "every state": 1, "block": 0}[damage]
    for path in tmp_path.rglob("*.kept"):
        if tokens[path.stem] >= least:
            content = bytearray(path.read_bytes())
            content[-70] ^= 4
            path.write_bytes(content)
    loaded.kept = kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
    scheduler, again = Scheduler(loaded), further(A, first)
    (second,) = ask(scheduler, again)
    assert second.token_ids == fresh(loaded, again)
    wanted = {"none": end, "state": middle}.get(damage, 0)
    assert (second.reused_tokens, second.from_disk) == (wanted, wanted)
    close(scheduler)
    kept.close()
    loaded.kept = None


def test_room_in_ram_is_needed_for_others(loaded: LoadedModel) -> None:
    """What pages lose is kept in RAM, as far as there is any for it."""
    for room in (0, 2**26):
        loaded.kept = kept = PrefixCache(ROOT, room)
        scheduler = Scheduler(loaded)
        (first,) = ask(scheduler, A)
        for seed in range(3):
            ask(scheduler, random_prompt(200, seed=seed))
        (second,) = ask(scheduler, again := further(A, first))
        assert second.token_ids == fresh(loaded, again)
        close(scheduler)
        kept.close()
    loaded.kept = None


def test_rows_that_begin_alike_read_that_once(loaded: LoadedModel) -> None:
    common, answers = random_prompt(80), dict[int, GenerationResult]()
    rows = [
        BatchRequest(
            n, ids=(*common, *random_prompt(1 + n, seed=n)), sampling=SamplingParams(max_tokens=3), end_ids=NO_END
        )
        for n in range(12)
    ]
    executor = BatchExecutor(loaded, BatchPolicy(rows=12, kv_bytes=2**24, sweep_tokens=60, micro_batch_tokens=64))
    executor.run(iter(rows), lambda answer: answers.__setitem__(answer.row, answer))
    executor.close()
    for asked in rows:
        assert_same_but_for_a_near_tie(loaded, asked.ids, answers[asked.row].token_ids, fresh(loaded, asked.ids, 3))
    shared = sorted(answer.reused_tokens for answer in answers.values())
    assert shared[0] == 0
    assert all(64 <= tokens <= 96 for tokens in shared[1:])


def test_chats_beside_rows_of_a_file_take_part_in_their_sweeps(loaded: LoadedModel) -> None:
    scheduler, ends = Scheduler(loaded), dict[int, Outcome]()
    lane_of(scheduler)._prices = Eager()
    job = Job(scheduler, [row(n, 30 + 20 * n, 25) for n in range(6)])

    def look() -> bool:
        if len(ends) < 3 and not scheduler.is_busy:
            number = len(ends)
            scheduler.submit(row(number, 60, 20), partial(ends.__setitem__, number))
        return False

    serve(scheduler, [job], look)
    assert job.outcomes == [BatchOutcome.FINISHED]
    assert len(ends) == 3
    for number, answer in [*job.answers.items(), *ends.items()]:
        asked = row(number, 60, 20) if answer.generated_tokens == 20 else job.rows[number]
        assert_same_but_for_a_near_tie(loaded, asked.ids, answer.token_ids, Alone(loaded).answer(asked).token_ids)
    close(scheduler)


def test_a_step_without_memory_loses_no_answer(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that it has half written are read again."""
    scheduler, own, calls = Scheduler(loaded), PagedSteps.write, 0

    def failing(self: PagedSteps, *what: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = own(self, *what)
        if calls == 5:
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "no memory")
        return logits

    prompts = [random_prompt(40, seed=seed) for seed in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(PagedSteps, "write", failing)
        results = ask(scheduler, *prompts, tokens=12, chat="")
    for prompt, result in zip(prompts, results, strict=True):
        assert_same_but_for_a_near_tie(loaded, prompt, result.token_ids, fresh(loaded, prompt, 12))
    close(scheduler)


def test_a_long_chat_holds_half_of_the_pages(loaded: LoadedModel) -> None:
    """Where every other layer has a window: so twice as many chats have room, or one twice as long."""
    scheduler, held = Scheduler(loaded), list[tuple[int, int, int]]()
    pool = lane_of(scheduler).pool
    if not pool.windows:
        return
    prompt = random_prompt(1800)
    whole = pool.page_weight + pool.window_weight

    def look(_text: str, _tokens: int) -> None:
        held.append((pool.held, pool.held_windows, pool.in_use))

    sampling = SamplingParams(max_tokens=100)
    request = BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=NO_END, on_text=look)
    assert scheduler.answer(request).token_ids == fresh(loaded, prompt, 100)
    for pages, windows, in_use in held[2:]:
        assert pages >= 1800 // 32
        assert windows <= 6  # what 40 tokens see, and two pages before that
        assert in_use <= 0.65 * (pages + AHEAD_TOKENS // 32) * whole
    spare = pool.spare
    for seed in range(2, 5):  # what windows left behind is used again
        ask(scheduler, random_prompt(1800, seed=seed), chat="")
    assert pool.spare <= spare + 3 * 0.75 * whole * (1800 // 32)
    close(scheduler)
