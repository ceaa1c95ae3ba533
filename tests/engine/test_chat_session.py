"""Real checkpoints, loaded as users load theirs, answering conversations."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.protocol import ChatMessage
from engine.runtime.decode.sequence import Sequence
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, library_tokens, open_model, random_prompt, spread, tiny_loaded
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint, tiny_model
from tests.refusals import refused

QUESTION = (ChatMessage("system", "Be brief."), ChatMessage("user", "What is the capital of France?"))
PROMPT = random_prompt(30)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LoadedModel, Any]]:
    """A checkpoint loaded by us, and the model that transformers made it from."""
    folder = tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / "model", prepare=spread)
    loaded = open_model(folder, "fp32")
    reference = tiny_model(request.param)
    spread(reference)
    yield loaded, reference
    loaded.close()


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded("qwen3_moe")


def test_greedy_is_transformers_generate(pair: tuple[LoadedModel, Any]) -> None:
    loaded, reference = pair
    result = Alone(loaded).generate_from_ids(PROMPT, SamplingParams(max_tokens=24), end_ids=NO_END)
    assert list(result.token_ids) == library_tokens(reference, PROMPT, 24)


def test_beams_are_transformers_generate(pair: tuple[LoadedModel, Any]) -> None:
    loaded, reference = pair
    result = Alone(loaded).generate_from_ids(PROMPT, SamplingParams(max_tokens=12, beams=4), end_ids=NO_END)
    assert list(result.token_ids) == library_tokens(reference, PROMPT, 12, num_beams=4)


def test_a_second_turn_reuses_the_first(pair: tuple[LoadedModel, Any]) -> None:
    loaded, _ = pair
    session, fresh = Alone(loaded), Alone(loaded)
    sampling = SamplingParams(max_tokens=12)
    first = session.generate(QUESTION, sampling)
    second_turn = (*QUESTION, ChatMessage("assistant", "Paris."), ChatMessage("user", "And of Italy?"))
    second = session.generate(second_turn, sampling)
    assert second.reused_tokens >= first.prompt_tokens - 16
    assert second.token_ids == fresh.generate(second_turn, sampling).token_ids


def test_stop_works_while_a_template_is_rendered(loaded: LoadedModel) -> None:
    endless = copy(loaded.tokenizer)
    endless.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    asked = iter([False, True, True, True])
    result = Alone(replace(loaded, tokenizer=endless)).generate(
        QUESTION, SamplingParams(), cancelled=lambda: next(asked)
    )
    assert result.finish_reason == "cancelled"


def test_the_answers_own_tokens_are_reused() -> None:
    """When the conversation, written out again, has the tokens that were generated, none of them is computed twice."""
    loaded = tiny_loaded("olmoe")
    session = Alone(loaded)
    first = session.generate(QUESTION, SamplingParams(max_tokens=4, stop=("\N{REPLACEMENT CHARACTER}",)))
    tokenizer = loaded.tokenizer
    again = tokenizer(first.text, add_special_tokens=False)["input_ids"]
    same = next((i for i, (a, b) in enumerate(zip(again, first.token_ids, strict=False)) if a != b), len(again))
    second_turn = (*QUESTION, ChatMessage("assistant", first.text), ChatMessage("user", "Why?"))
    second = session.generate(second_turn, SamplingParams(max_tokens=4))
    assert second.reused_tokens >= first.prompt_tokens + min(same, first.generated_tokens - 1) - 1


def test_streamed_text_is_the_text(loaded: LoadedModel) -> None:
    pieces: list[str] = []
    counts: list[int] = []
    progress: list[tuple[int, int]] = []

    def on_text(text: str, tokens: int) -> None:
        pieces.append(text)
        counts.append(tokens)

    request = BatchRequest(
        0,
        tuple(QUESTION),
        sampling=SamplingParams(max_tokens=30),
        on_text=on_text,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    result = Scheduler(loaded).answer(request)
    kept = [index for index in result.token_ids if index != loaded.tokenizer.eos_token_id]
    assert "".join(pieces) == result.text == loaded.tokenizer.decode(kept, skip_special_tokens=True)
    assert counts == sorted(counts)
    assert counts[-1] == result.generated_tokens == len(result.token_ids)
    assert progress[0] == (0, result.prompt_tokens)
    assert progress[-1] == (result.prompt_tokens, result.prompt_tokens)
    assert result.ttft_s > 0
    assert result.tokens_per_s > 0


def test_cancelled_within_one_token(loaded: LoadedModel) -> None:
    tokens = 0

    def on_text(text: str, generated: int) -> None:
        nonlocal tokens
        tokens = generated

    session = Alone(loaded)
    result = session.generate_from_ids(
        PROMPT, SamplingParams(max_tokens=100), end_ids=NO_END, on_text=on_text, cancelled=lambda: tokens >= 7
    )
    assert (result.finish_reason, result.generated_tokens) == ("cancelled", 7)
    # What it holds is whole: the next request goes on from there.
    again = session.generate_from_ids([*PROMPT, *result.token_ids], SamplingParams(max_tokens=5), end_ids=NO_END)
    assert again.reused_tokens == len(PROMPT) + 6
    assert list(again.token_ids) == library_tokens(loaded.model, [*PROMPT, *result.token_ids], 5)


def test_cancelled_before_it_starts(loaded: LoadedModel) -> None:
    result = Alone(loaded).generate_from_ids(PROMPT, SamplingParams(), cancelled=lambda: True)
    assert (result.finish_reason, result.text, result.generated_tokens) == ("cancelled", "", 0)
    assert (result.ttft_s, result.tokens_per_s) == (0, 0)


def test_the_same_seed_gives_the_same_tokens(loaded: LoadedModel) -> None:
    sampling = SamplingParams(temperature=2.0, top_k=40, top_p=0.95, min_p=0.001, max_tokens=20, seed=5)
    session = Alone(loaded)
    first, second = (session.generate_from_ids(PROMPT, sampling, end_ids=NO_END) for _ in range(2))
    assert first.token_ids == second.token_ids
    other = SamplingParams(temperature=2.0, max_tokens=20, seed=6)
    assert session.generate_from_ids(PROMPT, other, end_ids=NO_END).token_ids != first.token_ids


def test_the_repetition_penalty_leaves_earlier_turns_alone(loaded: LoadedModel) -> None:
    """The last question and the answer are counted, as in a chat that begins with them."""
    session, question = Alone(loaded), ChatMessage("user", "What is a train?")
    chat = [question, ChatMessage("assistant", "A train is a train."), question]
    counted: list[list[int]] = []

    own = Sequence.begin

    def begin(sequence: Sequence, prefix: list[int], *others: Any) -> None:
        counted.append(prefix[sequence.earlier :])
        own(sequence, prefix, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "begin", begin)
        for penalty in (1.0, 1.3):
            for messages in ([question], chat):
                session.generate(messages, SamplingParams(max_tokens=2, repetition_penalty=penalty))
    alone, whole, _, last = counted
    assert len(whole) > 2 * len(alone) - 4
    assert len(last) <= len(alone)
    assert whole[-len(last) :] == last
    assert alone[-len(last) :] == last
    assert loaded.tokenizer.decode(last).count("What is a train?") == 1


def test_the_repetition_penalty_is_transformers(loaded: LoadedModel) -> None:
    sampling = SamplingParams(max_tokens=24, repetition_penalty=1.5)
    result = Alone(loaded).generate_from_ids(PROMPT, sampling, end_ids=NO_END)
    assert list(result.token_ids) == library_tokens(loaded.model, PROMPT, 24, repetition_penalty=1.5)


def test_a_stop_string_is_not_part_of_the_answer(loaded: LoadedModel) -> None:
    session = Alone(loaded)
    free = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=30), end_ids=NO_END)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    shown: list[str] = []
    result = session.generate_from_ids(
        PROMPT,
        SamplingParams(max_tokens=30, stop=(stop,)),
        end_ids=NO_END,
        on_text=lambda text, tokens: shown.append(text),
    )
    assert result.finish_reason == "stop_string"
    assert result.text == "".join(shown) == free.text[: free.text.index(stop)]
    assert result.generated_tokens < 30


def test_the_models_end_token_ends_the_answer(loaded: LoadedModel) -> None:
    session = Alone(loaded)
    free = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=12), end_ids=NO_END)
    end = free.token_ids[5]
    result = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=12), end_ids=frozenset({end}))
    assert result.finish_reason == "stop"
    assert result.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert result.text == loaded.tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)


def test_the_end_of_the_context_ends_the_answer() -> None:
    session = Alone(tiny_loaded("llama", context_tokens=36))
    result = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=100), end_ids=NO_END)
    assert (result.finish_reason, result.generated_tokens) == ("context", 6)
    exact = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=6), end_ids=NO_END)
    assert exact.finish_reason == "length"


def test_a_prompt_beyond_the_context_is_refused_and_the_session_goes_on() -> None:
    session = Alone(tiny_loaded("llama", context_tokens=36))
    with refused(ErrorCode.PROMPT_TOO_LONG):
        session.generate((ChatMessage("user", "word " * 50),), SamplingParams())
    assert session.generate_from_ids(PROMPT, SamplingParams(max_tokens=2), end_ids=NO_END).generated_tokens == 2


def test_an_empty_prompt_is_refused(loaded: LoadedModel) -> None:
    with refused(ErrorCode.INVALID_REQUEST):
        Alone(loaded).generate_from_ids([], SamplingParams())


def test_running_out_of_memory_is_said_and_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_loaded("llama")
    session = Alone(loaded)

    def fail(*args: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(loaded.model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(EngineError) as caught:
            session.generate_from_ids(PROMPT, SamplingParams(), end_ids=NO_END)
    assert caught.value.code == ErrorCode.NOT_ENOUGH_MEMORY
    assert session.kv_bytes == 0
    assert session.generate_from_ids(PROMPT, SamplingParams(max_tokens=2), end_ids=NO_END).generated_tokens == 2
