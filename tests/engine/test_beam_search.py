"""Beam search finds what transformers' finds, and what a search without any cache finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.common.config import SamplingParams
from engine.runtime.decode.beam_search import BeamResult, beam_search
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone, search_over

PROMPT = random_prompt(24)


class WithoutCache:
    """Beams that compute everything again at each step."""

    def __init__(self, model: Any, prompt: list[int], width: int) -> None:
        self._model = model
        self._rows = [list(prompt) for _ in range(width)]

    def reorder(self, sources: torch.Tensor) -> None:
        self._rows = [list(self._rows[index]) for index in sources.tolist()]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        for row, token in zip(self._rows, tokens[:, 0].tolist(), strict=True):
            row.append(token)
        logits: torch.Tensor = self._model(input_ids=torch.tensor(self._rows), use_cache=False).logits[:, -1]
        return logits


def searched(model: Any, first: torch.Tensor, **how: Any) -> BeamResult:
    return search_over(model, beam_search(first, end_ids=NO_END, **how), first.device)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("family", ["llama", "olmoe", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid"])
def test_the_same_sequences_as_transformers(family: str, width: int) -> None:
    loaded = tiny_loaded(family)
    session = Alone(loaded)
    result = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=12, beams=width), end_ids=NO_END)
    assert list(result.token_ids) == library_tokens(loaded.model, PROMPT, 12, num_beams=width)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_sequences_with_end_tokens(width: int, seed: int) -> None:
    loaded = tiny_loaded("olmoe")
    prompt = random_prompt(10, seed)
    # Tokens that the search meets early, so that sequences of many lengths finish.
    met = library_tokens(loaded.model, prompt, 10, num_beams=width)
    ends = [met[3], met[7], *random_prompt(20, seed + 100)]
    session = Alone(loaded)
    result = session.generate_from_ids(prompt, SamplingParams(max_tokens=16, beams=width), end_ids=frozenset(ends))
    # An id that fills up shorter sequences must not be mistaken for a token.
    theirs = library_tokens(loaded.model, prompt, 16, num_beams=width, eos_token_id=sorted(set(ends)), pad_token_id=0)
    while theirs and theirs[-1] == 0:
        theirs.pop()
    assert list(result.token_ids) == theirs
    assert result.finish_reason == ("stop" if theirs[-1] in ends else "length")


@pytest.mark.parametrize("width", [2, 4])
def test_the_repetition_penalty_is_transformers(width: int) -> None:
    loaded = tiny_loaded("mixtral", sliding_window=None)
    sampling = SamplingParams(max_tokens=12, beams=width, repetition_penalty=1.4)
    result = Alone(loaded).generate_from_ids(PROMPT, sampling, end_ids=NO_END)
    theirs = library_tokens(loaded.model, PROMPT, 12, num_beams=width, repetition_penalty=1.4)
    assert list(result.token_ids) == theirs


@pytest.mark.parametrize("family", ["minimax", "deepseek_v4", "lfm2_moe", "zaya", "gemma4_text"])
def test_caches_follow_their_beams(family: str) -> None:
    """Where the library's own reordering is not to be trusted, computing everything again is the judge."""
    loaded = tiny_loaded(family)
    result = Alone(loaded).generate_from_ids(PROMPT, SamplingParams(max_tokens=10, beams=3), end_ids=NO_END)
    with torch.inference_mode():
        first = loaded.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[:, -1]
        plain = WithoutCache(loaded.model, PROMPT, 3)
        expected = searched(plain, first, width=3, max_tokens=10)
    assert list(result.token_ids) == expected.ids


def test_more_beams_than_there_are_tokens() -> None:
    class Constant:
        def reorder(self, sources: torch.Tensor) -> None:
            pass

        def step(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.tensor([[0.0, 1.0]]).expand(len(tokens), -1)

    result = searched(Constant(), torch.tensor([[0.0, 1.0]]), width=8, max_tokens=3)
    assert result.ids == [1, 1, 1]


def test_the_prompt_stays_for_the_next_request() -> None:
    loaded = tiny_loaded("olmoe")
    session = Alone(loaded)
    session.generate_from_ids(PROMPT, SamplingParams(max_tokens=8, beams=4), end_ids=NO_END)
    after = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=8), end_ids=NO_END)
    assert after.reused_tokens == len(PROMPT) - 1
    assert list(after.token_ids) == library_tokens(loaded.model, PROMPT, 8)


def test_cancelled_between_two_steps() -> None:
    session = Alone(tiny_loaded("olmoe"))
    lengths: list[int] = []
    result = session.generate_from_ids(
        PROMPT,
        SamplingParams(max_tokens=50, beams=3),
        end_ids=NO_END,
        on_text=lambda text, tokens: lengths.append(tokens),
        cancelled=lambda: len(lengths) >= 5,
    )
    assert result.finish_reason == "cancelled"
    assert result.generated_tokens == 5


def test_stop_strings_finish_a_beam() -> None:
    loaded = tiny_loaded("olmoe")
    session = Alone(loaded)
    free = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=12, beams=2), end_ids=NO_END)
    stop = loaded.tokenizer.decode(free.token_ids[5:6])
    result = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=12, beams=2, stop=(stop,)), end_ids=NO_END)
    assert stop not in result.text
    assert result.finish_reason in ("stop_string", "length")


def test_the_score_is_the_mean_log_probability() -> None:
    loaded = tiny_loaded("llama")
    with torch.inference_mode():
        first = loaded.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[:, -1]
        plain = WithoutCache(loaded.model, PROMPT, 4)
        found = searched(plain, first, width=4, max_tokens=6)
        logits = loaded.model(input_ids=torch.tensor([[*PROMPT, *found.ids]]), use_cache=False).logits[0]
    log_probs = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    mean = float(log_probs.gather(-1, torch.tensor(found.ids)[:, None]).mean())
    assert found.score == pytest.approx(mean, abs=1e-4)
