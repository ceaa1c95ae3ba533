"""Tokens that are guessed and tried together change no answer, and are tried only as far as they pay."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch_files.rows import Constraint
from engine.common import clock
from engine.common.config import SamplingParams
from engine.kernels.native.build import library_path
from engine.runtime.decode.constrained import ConstrainedAnswers
from engine.runtime.decode.generation import BatchRequest, ChanceLog, GenerationResult
from engine.runtime.decode.sequence import Sequence as Answer
from engine.runtime.decode.speculation import Guess, Speculation, StepPrices
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry.lanes import DECODE
from engine.telemetry.recorder import RECORDER
from tests.engine.loaded_tiny import NO_END, open_model, random_prompt, spread, tiny_tokenizer
from tests.engine.single_streams import Alone
from tests.engine.tiny_families import tiny_checkpoint

native = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
WORDS = 5
PROMPT = [*random_prompt(12), *random_prompt(12), *random_prompt(8)]


class Clock:
    """Stands still but for what steps take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(clock, "now", lambda: self.now_s)


class ScriptedSession:
    """Logits that follow from the tokens held alone.

    Args:
        prices: seconds of steps of 1, 2, ... tokens.
    """

    def __init__(self, ids: Sequence[int], prices: Sequence[float] = (1.0,) * 8, clock: Clock | None = None) -> None:
        self.ids = list(ids)
        self._prices, self._clock = prices, clock
        self.steps = 0

    def logits(self, held: int) -> torch.Tensor:
        """After the first `held` tokens [V]; they depend on the last two."""
        generator = torch.Generator().manual_seed(7 * self.ids[held - 1] + self.ids[held - 2])
        return 2 * torch.randn(WORDS, generator=generator)

    def drafters(self) -> list[Any]:
        return []

    def takes(self, tokens: int) -> bool:
        return tokens <= 8

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:
        assert int(token) == token_id
        return self.several([token_id])

    def several(self, ids: Sequence[int]) -> torch.Tensor:
        self.steps += 1
        if self._clock is not None:
            self._clock.now_s += self._prices[len(ids) - 1]
        held = len(self.ids)
        self.ids += ids
        return torch.stack([self.logits(held + number) for number in range(1, len(ids) + 1)])

    def take_back(self, tokens: int) -> None:
        del self.ids[-tokens:]


class GuessedSteps:
    """The steps of an answer over a scripted session, with guesses."""

    def __init__(self, session: ScriptedSession, prices: StepPrices, prefix: Sequence[int], most_tokens: int) -> None:
        self._session, self._prices = session, prices
        self.speculation = Speculation(prices, prefix, most_tokens, session.drafters())
        self._guess: Guess | None = None
        self._rows = torch.empty(0)
        self._at = 0
        self._step_s = 0.0

    def foresaw(self, token_id: int) -> bool:
        """Whether the logits after this token are there already."""
        guess = self._guess
        return guess is not None and self._at < len(guess.ids) and guess.ids[self._at] == token_id

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:
        """The answer's next token; logits [1, V] after it."""
        self.speculation.append((token_id,))
        if self.foresaw(token_id):
            self._at += 1
            return self._rows[self._at : self._at + 1]
        self.settle()
        begun_s = clock.now()
        guess = self.speculation.guess(self._session.takes)
        guessed_s = clock.now()
        if guess is None:
            logits = self._session.step(token, token_id)
            self._prices.took(1, clock.now() - guessed_s)
            return logits
        self._rows = self._session.several([token_id, *guess.ids])
        now_s = clock.now()
        self._step_s = now_s - begun_s
        self._prices.took(1 + len(guess.ids), now_s - guessed_s)
        self._guess, self._at = guess, 0
        return self._rows[:1]

    def settle(self) -> None:
        """Takes back what the answer does not go on with, and learns from it.  Harmless if repeated."""
        guess, self._guess = self._guess, None
        if guess is None:
            return
        tried, came_true = len(guess.ids), self._at
        if came_true < tried:
            begun_s = clock.now()
            self._session.take_back(tried - came_true)
            back_s = clock.now() - begun_s
            self._step_s += back_s
            self._prices.took_back(back_s)
        self.speculation.settle(guess, came_true, self._step_s)


class Eager(StepPrices):
    """Whatever is guessed seems to cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.single_s = 1.0

    def took(self, tokens: int, seconds: float) -> None:
        pass

    def ratio(self, tokens: int) -> float:
        return 1.0 if tokens == 1 else 1e-3


def _decoded(session: Any, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    scripted = session if isinstance(session, ScriptedSession) else session._session
    logits = scripted.logits(len(prompt))[None]
    answer = Answer(BatchRequest(0, sampling=sampling))
    answer.prepared(list(prompt), tiny_tokenizer(), sampling.max_tokens, NO_END)
    answer.begin(list(prompt))
    while answer.take(int(token := answer.choose(logits)))[1] is None:
        logits = session.step(token, int(token))
    return answer.ids


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, top_k=4, min_p=0.05, seed=3)])
@pytest.mark.parametrize("length", [1, 2, 3, 17, 60])
def test_answers_are_those_of_single_steps(sampling: SamplingParams, length: int) -> None:
    sampling, prompt = replace(sampling, max_tokens=length), [1, 2, 3, 1, 2, 3, 4, 1, 2]
    alone, guessing = ScriptedSession(prompt), ScriptedSession(prompt)
    tries = GuessedSteps(guessing, Eager(), prompt, length)
    assert _decoded(tries, prompt, sampling) == _decoded(alone, prompt, sampling)
    tries.settle()
    assert guessing.ids == alone.ids
    assert tries.speculation.accepted <= tries.speculation.guessed
    assert guessing.steps == alone.steps - tries.speculation.accepted


def test_sampled_tokens_keep_their_distribution() -> None:
    """Of three tokens in a row, each triple as often as the model gives it, whatever was guessed."""
    prompt, draws = [2, 0, 1, 2, 1, 3, 2, 2, 4, 2, 3, 0, 2, 4, 1, 1, 2], 4000
    counts: dict[tuple[int, ...], int] = {}
    tried = 0
    for seed in range(draws):
        tries = GuessedSteps(ScriptedSession(prompt), Eager(), prompt, 3)
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=3)
        triple = tuple(_decoded(tries, prompt, sampling))
        counts[triple] = counts.get(triple, 0) + 1
        tried += tries.speculation.guessed
    assert tried > draws / 2
    chi, kinds = 0.0, 0
    for first in range(WORDS):
        for second in range(WORDS):
            for third in range(WORDS):
                held, likely = [*prompt], 1.0
                for token in (first, second, third):
                    likely *= float(ScriptedSession(held).logits(len(held)).softmax(-1)[token])
                    held.append(token)
                expected = draws * likely
                if expected >= 5:
                    chi += (counts.get((first, second, third), 0) - expected) ** 2 / expected
                    kinds += 1
    assert kinds > 20
    assert chi < kinds + 4 * (2 * kinds) ** 0.5  # four standard deviations


def _time(
    answer: Sequence[int], prompt: Sequence[int], prices: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int]:
    """Seconds that an answer takes beyond its first token, over those of single steps, and the tokens guessed."""
    clock = Clock(monkeypatch)
    session = ScriptedSession(prompt, prices, clock)
    tries = GuessedSteps(session, StepPrices(), prompt, len(answer))
    for token in answer[:-1]:
        tries.step(torch.tensor([[token]]), token)
    tries.settle()
    return clock.now_s / (prices[0] * (len(answer) - 1)), tries.speculation.guessed


EXPERTS = (1.0, 1.5, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0)
"""Measured of a model with 8 of 128 experts."""


@pytest.mark.parametrize("prices", [EXPERTS, tuple(range(1, 9)), tuple(1 + 1.5 * n for n in range(8))])
@pytest.mark.parametrize("words", [2, 3, 8, 40])
def test_an_answer_that_does_not_quote_loses_next_to_nothing(
    prices: tuple[float, ...], words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(words)
    for length in (60, 400):
        prompt, answer = ([draw.randrange(words) for _ in range(n)] for n in (300, length))
        took, _ = _time(answer, prompt, prices, monkeypatch)
        first = max(0.5, prices[1] - 1)  # what it costs to find out
        assert took < 1 / (1 - 0.015) + first / length + 0.001


def test_an_answer_that_quotes_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    prompt = [draw.randrange(1000) for _ in range(600)]
    answer = [*prompt[100:200], 5, 6, 7, *prompt[210:300], *(draw.randrange(1000) for _ in range(20))]
    took, guessed = _time(answer, prompt, EXPERTS, monkeypatch)
    assert took < 1 / 1.5
    assert guessed > 100


def test_nothing_is_guessed_where_it_cannot_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(50))
    took, guessed = _time([*prompt, *prompt], [*prompt, *prompt], tuple(1.2 * n for n in range(1, 9)), monkeypatch)
    assert guessed < 10
    assert took < 1.05


class Costly:
    """A drafter whose guesses take as long as half a step, and never come true."""

    takes_s = 0.5

    def __init__(self, clock: Clock, *, hopes: float) -> None:
        self._clock, self._hopes = clock, hopes
        self.asked = 0

    def append(self, token_id: int) -> None:
        pass

    def hopes(self) -> float:
        return self._hopes

    def guess(self, most: int) -> Guess:
        self.asked += 1
        self._clock.now_s += self.takes_s
        return Guess((WORDS + 1,), (self._hopes,), (0,))

    def learn(self, guess: Guess, came_true: int) -> None:
        assert came_true == 0


@pytest.mark.parametrize("hopes", [0.3, 0.6, 0.95])
def test_a_drafter_that_takes_time_is_asked_only_as_far_as_that_may_be_lost(
    hopes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    session = ScriptedSession([1, 2], EXPERTS, clock)
    costly = Costly(clock, hopes=hopes)
    monkeypatch.setattr(session, "drafters", lambda: [costly])
    tries = GuessedSteps(session, StepPrices(), [1, 2], 1001)
    for number in range(1000):
        tries.step(torch.tensor([[number % WORDS]]), number % WORDS)
    tries.settle()
    assert clock.now_s < 1000 / (1 - 0.015) + 1.5
    assert costly.asked < 20


@pytest.fixture(scope="module", params=["auto", "int8"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """With keys and values as the model has them, and in int8."""

    path: Path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("guessing") / "model", prepare=spread)
    model = open_model(path, "int8", threads=2, speculation="auto", kv_precision=request.param)
    assert (model.kv_type is None) == (request.param == "auto")
    yield model
    model.close()


def _answer(loaded: LoadedModel, sampling: SamplingParams, *, guesses: bool, **options: Any) -> GenerationResult:
    session = Alone(loaded, speculates=guesses)
    if guesses:
        session._prices = Eager()
    result = session.generate_from_ids(PROMPT, sampling, end_ids=NO_END, **options)
    # What is kept for the next prompt is the answer, without what was only tried.
    assert session.kv_tokens == len(PROMPT) + len(result.token_ids) - 1
    more = [*PROMPT, *result.token_ids, 9, 8]
    assert session.generate_from_ids(more, SamplingParams(max_tokens=2)).reused_tokens == session_held(more)
    return result


def session_held(prompt: Sequence[int]) -> int:
    """All but the last token of the answer before, and what was asked anew."""
    return len(prompt) - 3


KINDS = {
    "greedy": SamplingParams(max_tokens=60),
    "sampled": SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=5),
    "penalised": SamplingParams(max_tokens=40, repetition_penalty=1.3),
    "dry": SamplingParams(max_tokens=40, dry_multiplier=0.8, temperature=0.5, seed=2),
}


@native
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_models_answers_stay_the_same(loaded: LoadedModel, kind: str) -> None:
    alone, guessing = (_answer(loaded, KINDS[kind], guesses=guesses) for guesses in (False, True))
    assert guessing.token_ids == alone.token_ids
    assert (guessing.text, guessing.finish_reason) == (alone.text, alone.finish_reason)
    assert alone.guessed_tokens == 0
    if kind == "greedy":  # which repeats itself
        assert guessing.guessed_tokens > 0


@native
def test_stop_strings_constraints_and_cancelling(loaded: LoadedModel) -> None:
    whole = Alone(loaded, speculates=False).generate_from_ids(PROMPT, KINDS["greedy"], end_ids=NO_END)
    stop = whole.text[len(whole.text) // 2 :][:3]
    stopped = SamplingParams(max_tokens=60, stop=(stop,))
    answers = [_answer(loaded, stopped, guesses=guesses) for guesses in (False, True)]
    assert answers[0].finish_reason == "stop_string"
    assert answers[0].token_ids == answers[1].token_ids
    constraints = ConstrainedAnswers(loaded.tokenizer, loaded.model.config.vocab_size, frozenset({2}))
    choice = Constraint(choices=("to be or not to be or not to be", "not to be or to be"))
    chosen = [
        _answer(loaded, KINDS["greedy"], guesses=guesses, constraint=constraints.begin(choice))
        for guesses in (False, True)
    ]
    assert chosen[0].token_ids == chosen[1].token_ids
    asked = iter([False] * 25 + [True] * 100)
    cut = _answer(loaded, KINDS["greedy"], guesses=True, cancelled=lambda: next(asked))
    assert cut.finish_reason == "cancelled"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


@native
def test_how_likely_each_token_was_is_the_same(loaded: LoadedModel) -> None:
    logs = []
    for guesses in (False, True):
        logs.append(ChanceLog(3))
        _answer(loaded, KINDS["sampled"], guesses=guesses, chances=logs[-1])
    assert logs[0].tokens == logs[1].tokens
    assert len(logs[0].tokens) == 60


@native
def test_a_step_of_several_tokens_is_one_step_with_all_its_tokens(loaded: LoadedModel) -> None:
    session = Alone(loaded)
    session._prices = Eager()
    RECORDER.start()
    try:
        result = session.generate_from_ids(PROMPT, KINDS["greedy"], end_ids=NO_END)
    finally:
        RECORDER.stop()
        steps = RECORDER.take_steps()
        RECORDER.take_spans()
    decoding = steps[steps["name"] == DECODE]
    assert decoding["tokens"].sum() == len(result.token_ids) - 1
    assert len(decoding) == len(result.token_ids) - 1 - result.accepted_tokens
    assert decoding["tokens"].max() > 1
    assert result.accepted_tokens > 0
    assert (decoding["end_ns"] > decoding["start_ns"]).all()


@native
def test_speculation_can_be_turned_off(loaded: LoadedModel) -> None:
    loaded.speculates = False
    try:
        assert Alone(loaded).generate_from_ids(PROMPT, KINDS["greedy"], end_ids=NO_END).guessed_tokens == 0
    finally:
        loaded.speculates = True
