"""Our choice of tokens against transformers' logits processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.common.config import SamplingParams
from engine.runtime.decode.sampling import (
    candidates,
    draw,
    greedy_token,
    make_chooser,
    penalise_repetition,
    seeded_generator,
)


def logits_of(seed: int, vocabulary: int) -> torch.Tensor:
    """Distinct random logits [V]: equal ones have no order to agree on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocabulary, generator=generator) * (12.0 / vocabulary) + torch.rand(1, generator=generator)


def library_distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Of transformers' processors, in llama.cpp's order."""
    warpers = LogitsProcessorList()
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    warpers.append(TemperatureLogitsWarper(sampling.temperature))
    no_ids: Any = None
    return warpers(no_ids, logits[None])[0].softmax(-1)


def our_distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    choice = candidates(logits, sampling)
    full = torch.zeros_like(logits)
    ids = torch.arange(len(logits)) if choice.token_ids is None else choice.token_ids
    full[ids] = choice.probabilities
    return full


@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([3, 50, 400, 3000]),
    temperature=st.floats(0.2, 3),
    top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_the_distribution_is_transformers(
    seed: int, vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(seed, vocabulary)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours, theirs = our_distribution(logits, sampling), library_distribution(logits, sampling)
    # A token on the very edge of top-p may fall to either side by rounding; its mass is then what may differ.
    edge = 2e-6 if bool(((ours > 0) == (theirs > 0)).all()) else float(theirs[theirs > 0].min() + ours[ours > 0].min())
    assert (ours - theirs).abs().max() <= edge + 1e-6
    assert int(((ours > 0) != (theirs > 0)).sum()) <= 1


@given(seed=st.integers(0, 10_000), penalty=st.floats(0.5, 3), ids=st.lists(st.integers(0, 49), min_size=1))
def test_the_repetition_penalty_is_transformers(seed: int, penalty: float, ids: list[int]) -> None:
    logits = (logits_of(seed, 50) - 6)[None]
    seen = torch.tensor([ids])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.clone())
    assert torch.equal(penalise_repetition(logits, seen, penalty), theirs)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]], dtype=torch.bfloat16)
    assert greedy_token(logits).tolist() == [[1]]


def test_draws_follow_the_probabilities() -> None:
    choice = candidates(torch.tensor([2.0, 0.0, 1.0]), SamplingParams(temperature=1.0))
    generator = seeded_generator(3, torch.device("cpu"))
    counts = torch.bincount(torch.cat([draw(choice, generator) for _ in range(4000)]).flatten(), minlength=3)
    assert torch.allclose(counts / 4000, choice.probabilities, atol=0.03)


def test_the_same_seed_draws_the_same_tokens() -> None:
    logits = logits_of(1, 400)[None]
    sampling = SamplingParams(temperature=1.5, top_k=50, seed=11)
    runs = []
    for _ in range(2):
        choose = make_chooser(sampling, torch.device("cpu"))
        runs.append([int(choose(logits)) for _ in range(20)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


@pytest.mark.parametrize("seed", [-1, 2**70, 0])
def test_any_integer_is_a_seed(seed: int) -> None:
    torch.rand(3, generator=seeded_generator(seed, torch.device("cpu")))


def test_without_a_seed_every_answer_differs() -> None:
    first, second = (seeded_generator(None, torch.device("cpu")) for _ in range(2))
    assert first.initial_seed() != second.initial_seed()
