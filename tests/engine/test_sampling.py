"""Our choice of tokens, beams and DRY against transformers' and their definitions, and where they must not reach."""

from dataclasses import replace
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
from engine.runtime.decode.beam_search import BeamResult, beam_search, decode_beams
from engine.runtime.decode.generation import BatchRequest
from engine.runtime.decode.sampling import (
    Breakers,
    DryPenalty,
    breakers_of,
    candidates,
    draw,
    greedy_token,
    make_chooser,
    penalise_repetition,
    seeded_generator,
)
from engine.runtime.decode.sequence import Sequence as Answer
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt, tiny_loaded, tiny_tokenizer
from tests.engine.single_streams import Alone, search_over


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


def _sequence(prefix: list[int], sampling: SamplingParams, constraint: Any = None) -> Answer:
    sequence = Answer(BatchRequest(0, sampling=sampling))
    sequence.prepared(prefix, tiny_tokenizer(), 99, frozenset({0}), (), constraint)
    sequence.begin(prefix)
    return sequence


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
    asked = Answer(BatchRequest(0, sampling=sampling))
    asked.prepared([], tiny_tokenizer(), 99, NO_IDS)
    first = model.logits(torch.tensor([[3]]))
    search = decode_beams(first, asked, [])
    search_over(model, search, first.device)
    assert (asked.ids == [0, 1, 2, 3] * 6) == (multiplier == 0)


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
def test_the_repetition_penalty_of_beams_is_transformers(width: int) -> None:
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
