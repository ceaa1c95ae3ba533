"""DRY against its definition, and where it must not reach: end tokens, constraints, other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.runtime.decode.beam_search import decode_beams
from engine.runtime.decode.dry import Breakers, DryPenalty, _known_breakers, breakers_of
from engine.runtime.decode.sequence import AnswerLimits, AnswerSequence
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import tiny_loaded, tiny_tokenizer
from tests.engine.single_streams import Alone, search_over


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded("qwen3_moe")


NO_IDS: frozenset[int] = frozenset()
TOKENS = st.integers(0, 4)
BREAKERS = st.dictionaries(
    TOKENS, st.lists(st.lists(TOKENS, max_size=3).map(tuple), min_size=1, max_size=2).map(tuple), max_size=2
)
SAMPLING = st.builds(
    SamplingParams,
    dry_multiplier=st.floats(0.1, 5),
    dry_base=st.sampled_from([1.0, 1.1, 1.75, 4.0]),
    dry_allowed_length=st.integers(0, 5),
    dry_range=st.sampled_from([-1, 1, 2, 5, 12, 1000]),
)


def by_definition(
    history: list[int], sampling: SamplingParams, breakers: Breakers, spared: frozenset[int] = NO_IDS
) -> dict[int, float]:
    """KoboldCpp's and llama.cpp's four steps, with every length found by comparing token by token."""
    if not sampling.uses_dry:
        return {}
    window = len(history) if sampling.dry_range < 0 else min(len(history), sampling.dry_range)
    newest_first = history[::-1][:window]
    if window <= sampling.dry_allowed_length:
        return {}
    limit = window
    for back in range(window):
        longest = -1
        for tail in breakers.get(newest_first[back], ()):
            rest = newest_first[max(back - len(tail), 0) : back][::-1]
            if len(tail) <= back and tuple(rest) == tail:
                longest = max(longest, len(tail))
        if longest >= 0:
            limit = back - longest
            break
    if limit < sampling.dry_allowed_length:
        return {}
    longest_of: dict[int, int] = {}
    for shift in range(1, window):
        length = 0
        while shift + length < window and newest_first[length] == newest_first[shift + length]:
            length += 1
        length = min(length, limit)
        if length >= sampling.dry_allowed_length:
            token = newest_first[shift - 1]
            longest_of[token] = max(length, longest_of.get(token, 0))
    return {
        token: sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
        for token, length in longest_of.items()
        if token not in spared and () not in breakers.get(token, ())
    }


def found(penalty: DryPenalty) -> dict[int, float]:
    ids, penalties = penalty.penalties()
    return dict(zip(ids.tolist(), penalties.tolist(), strict=True))


@given(
    prompt=st.lists(TOKENS, max_size=30),
    answer=st.lists(TOKENS, max_size=20),
    sampling=SAMPLING,
    breakers=BREAKERS,
    spared=st.frozensets(TOKENS, max_size=2),
)
def test_it_is_its_definition_at_every_token(
    prompt: list[int], answer: list[int], sampling: SamplingParams, breakers: Breakers, spared: frozenset[int]
) -> None:
    penalty = DryPenalty(prompt, sampling, breakers, spared)
    assert found(penalty) == pytest.approx(by_definition(prompt, sampling, breakers, spared), rel=1e-5)
    for count, token in enumerate(answer, start=1):
        penalty.append(token)
        if count % 3:  # it may also be asked only now and then
            continue
        history = [*prompt, *answer[:count]]
        assert found(penalty) == pytest.approx(by_definition(history, sampling, breakers, spared), rel=1e-5)


@given(period=st.integers(1, 7), length=st.integers(0, 400))
def test_a_long_loop_is_its_definition(period: int, length: int) -> None:
    history = [index % period for index in range(length)]
    sampling = SamplingParams(dry_multiplier=0.8, dry_base=1.05)
    assert found(DryPenalty(history, sampling, {}, NO_IDS)) == pytest.approx(by_definition(history, sampling, {}))


def test_llama_cpps_own_examples() -> None:
    """The cases of its tests/test-sampling.cpp, as penalties."""
    cases: list[tuple[list[int], SamplingParams, Breakers, dict[int, float]]] = [
        ([0, 1], SamplingParams(dry_multiplier=1, dry_base=1.1, dry_allowed_length=2, dry_range=4), {}, {}),
        ([0, 1, 2, 0, 1], SamplingParams(dry_multiplier=1, dry_base=1.1, dry_range=5), {}, {2: 1.0}),
        ([0, 1, 3, 4, 0, 1], SamplingParams(dry_multiplier=1, dry_base=1.1, dry_range=6), {3: ((),)}, {}),
        ([0, 1, 2, 0, 1], SamplingParams(dry_multiplier=2, dry_base=1.1, dry_range=5), {}, {2: 2.0}),
        (
            [0, 1, 2, 3, 4, 0, 1],
            SamplingParams(dry_multiplier=1, dry_base=1.1, dry_allowed_length=4, dry_range=7),
            {},
            {},
        ),
    ]
    for history, sampling, breakers, expected in cases:
        assert found(DryPenalty(history, sampling, breakers, NO_IDS)) == pytest.approx(expected)


def test_the_penalty_stays_finite() -> None:
    penalty = DryPenalty([3] * 5000, SamplingParams(dry_multiplier=100, dry_base=10), {}, NO_IDS)
    logits = penalty.apply(torch.zeros(1, 5))
    assert bool(logits.isfinite().all())
    assert int(logits.argmin()) == 3


@pytest.mark.parametrize("off", [{"dry_multiplier": 0.0}, {"dry_multiplier": 1.0, "dry_range": 0}])
def test_off_it_costs_nothing(off: dict[str, Any]) -> None:
    assert not SamplingParams(**off).uses_dry
    assert _sequence([1] * 9, SamplingParams(**off)).is_greedy


# --- breakers -------------------------------------------------------------------------------------


class _Words:
    """A tokenizer of given words, which takes the longest that fits."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, ids: list[int], **_options: Any) -> str:
        return "".join(self.words[index] for index in ids)

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            word = max(filter(text.startswith, self.words), key=len)
            ids.append(self.words.index(word))
            text = text[len(word) :]
        return ids


def test_a_breaker_is_found_in_tokens_and_across_them() -> None:
    tokenizer = _Words("a", "b", "c", "xab", "abc", "bc", "ca", "\n", ".\n\n")
    assert breakers_of(tokenizer, ("\n",), tokenizer.encode) == {7: ((),), 8: ((),)}
    assert breakers_of(tokenizer, ("abc",), tokenizer.encode) == {
        0: ((5,),),  # a|bc
        3: ((2,),),  # xab|c
        4: ((),),
        6: ((5,),),  # ca|bc
    }
    assert breakers_of(tokenizer, (), tokenizer.encode) == {}


@given(
    words=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=8),
    breakers=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
)
def test_breakers_against_their_definition(words: list[str], breakers: list[str]) -> None:
    tokenizer, expected = _Words("a", "b", "\n", *words), dict[int, set[tuple[int, ...]]]()
    for token, word in enumerate(tokenizer.words):
        for breaker in breakers:
            sizes = [len(breaker)] if breaker in word else range(1, len(breaker))
            for size in sizes:
                if breaker in word or word.endswith(breaker[:size]):
                    expected.setdefault(token, set()).add(tuple(tokenizer.encode(breaker[size:])))
    found = breakers_of(tokenizer, tuple(breakers), tokenizer.encode)
    assert {token: set(tails) for token, tails in found.items()} == expected


def test_each_token_is_looked_at_once_for_all_breakers() -> None:
    """Nobody's request for a hundred long ones may keep the others waiting, nor do many fill the memory."""

    class Word(str):
        looks = 0

        def __getitem__(self, place: Any) -> str:
            Word.looks += 1
            return str.__getitem__(self, place)

    tokenizer = _Words(*(Word(f"{number:03}") for number in range(500)))
    for number in range(40):
        breakers_of(tokenizer, tuple(f"{number}{'9' * (first % 30)}{first}" for first in range(100)), lambda _: [0])
    assert Word.looks <= 3 * 500 * 40
    assert len(_known_breakers[tokenizer]) < 40


def test_a_breaker_of_characters_that_no_token_holds() -> None:
    pieces = {"\N{IDEOGRAPHIC FULL STOP}": [0, 1, 2]}
    tokenizer = _Words("\ufffd", "\ufffd", "\ufffd", "a")
    assert breakers_of(tokenizer, tuple(pieces), pieces.__getitem__) == {0: ((1, 2),)}


def test_the_default_breakers_of_a_real_vocabulary() -> None:
    tokenizer = tiny_tokenizer()
    breakers = breakers_of(tokenizer, SamplingParams().dry_breakers, lambda text: tokenizer.encode(text))
    assert breakers
    for token, tails in breakers.items():
        text = tokenizer.decode([token])
        assert tails == ((),)
        assert any(breaker in text for breaker in SamplingParams().dry_breakers)


# --- in answers -----------------------------------------------------------------------------------


def _sequence(prefix: list[int], sampling: SamplingParams, constraint: Any = None) -> AnswerSequence:
    limits = AnswerLimits.within(99, sampling, frozenset({0}), ())
    return AnswerSequence(prefix, sampling, limits, tiny_tokenizer(), constraint)


STRONG = SamplingParams(dry_multiplier=50.0, dry_breakers=(), dry_range=1000)


def test_an_end_token_is_never_penalised() -> None:
    history = [5, 6, 0, 5, 6]
    logits = torch.tensor([[1.0, 0.9, 0, 0, 0, 0, 0]])
    for sampling in (STRONG, SamplingParams(repetition_penalty=10.0)):
        assert int(_sequence(history, sampling).choose(logits)) == 0
    # Any other token in its place is.
    assert int(_sequence([5, 6, 2, 5, 6], STRONG).choose(torch.tensor([[0.0, 0.9, 1.0, 0, 0, 0, 0]]))) == 1


def test_by_default_an_answer_is_compared_with_itself_alone() -> None:
    """Whoever asks the same again gets the same answer."""
    asked, said = [1, 2], [5, 6, 3, 4]
    history = [*asked, *said, *asked]
    answer, ranged = _sequence(history, replace(STRONG, dry_range=-1)), _sequence(history, STRONG)
    for token in (5, 6):
        answer.take(token)
        ranged.take(token)
    logits = torch.tensor([[0.0, 0.5, 0.0, 1.0, 0, 0, 0, 0]])
    assert int(answer.choose(logits)) == 3
    assert int(ranged.choose(logits)) == 1
    for token in (3, 5, 6):
        answer.take(token)
    assert int(answer.choose(logits)) == 1


class _OneOf:
    """A constraint that allows some tokens, always the same."""

    def __init__(self, *allowed: int) -> None:
        self._allowed = list(allowed)

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        mask = torch.full_like(logits, float("-inf"))
        mask[self._allowed] = 0
        return logits + mask

    def accept(self, _token_id: int) -> bool:
        return False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_is_never_broken_and_what_it_forces_stays(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, dry_multiplier=100.0, dry_base=10.0, dry_breakers=(), seed=1)
    logits = torch.zeros(1, 8)
    for allowed in ((3,), (3, 4)):
        sequence = _sequence([], sampling, _OneOf(*allowed))
        for _ in range(80):
            token = int(sequence.choose(logits))
            assert token in allowed
            sequence.take(token)


def test_a_constrained_answer_may_copy_from_its_prompt() -> None:
    logits = torch.tensor([[0.0, 0.5, 0.0, 1.0, 0, 0, 0, 0]])
    prompt = [5, 6, 3, 5, 6]
    assert int(_sequence(prompt, STRONG).choose(logits)) == 1
    sequence = _sequence(prompt, STRONG, _OneOf(1, 3))
    assert int(sequence.choose(logits)) == 3


def test_rows_know_nothing_of_each_other() -> None:
    alone, beside = (_sequence([], SamplingParams(dry_multiplier=5.0, temperature=1.0, seed=4)) for _ in range(2))
    other = _sequence([1, 2, 3] * 9, SamplingParams(dry_multiplier=5.0, temperature=1.0, seed=4))
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        logits = torch.randn(1, 8, generator=generator)
        token = int(alone.choose(logits))
        alone.take(token)
        other.take(int(other.choose(logits)))
        assert int(beside.choose(logits)) == token
        beside.take(token)


class _Looping:
    """A model that always says one thing: after token n comes (n + 1) % 4, whatever the history."""

    def __init__(self) -> None:
        self._next = torch.eye(6).roll(1, dims=1)
        self._next[3] = torch.eye(6)[0]

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return 4 * self._next[tokens[:, -1]]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(tokens)

    def reorder(self, sources: torch.Tensor) -> None:
        """It remembers nothing."""


@pytest.mark.parametrize("multiplier", [0.0, 2.0])
def test_beams_are_penalised_by_their_own_tokens(multiplier: float) -> None:
    model: Any = _Looping()
    sampling = SamplingParams(beams=2, max_tokens=24, dry_multiplier=multiplier, dry_breakers=())
    limits = AnswerLimits.within(99, sampling, NO_IDS, ())
    first = model.logits(torch.tensor([[3]]))
    search = decode_beams(first, sampling, limits, [], tiny_tokenizer(), lambda _text, _count: None, lambda: False)
    said = search_over(model, search, first.device)
    assert (said.ids == [0, 1, 2, 3] * 6) == (multiplier == 0)


def test_greedy_with_dry_ends_a_loop_and_without_it_is_unchanged(loaded: LoadedModel) -> None:
    session = Alone(loaded)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]

    def ask(**settings: Any) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=40, **settings)
        return session.generate_from_ids(prompt, sampling, end_ids=NO_IDS).token_ids

    plain = ask()
    assert ask(dry_multiplier=0.0, dry_base=3.0, dry_allowed_length=1) == plain
    dry = ask(dry_multiplier=3.0, dry_breakers=())
    assert dry == ask(dry_multiplier=3.0, dry_breakers=())

    def fours(ids: tuple[int, ...]) -> int:
        return len({ids[i : i + 4] for i in range(len(ids) - 3)})

    assert fours(dry) >= fours(plain)


def test_the_same_seed_gives_the_same_answer_with_dry(loaded: LoadedModel) -> None:
    session = Alone(loaded)
    sampling = SamplingParams(temperature=1.0, min_p=0.05, dry_multiplier=0.8, seed=9, max_tokens=30)
    first, second = (session.generate_from_ids([5, 6, 7], sampling, end_ids=NO_IDS).token_ids for _ in range(2))
    assert first == second
