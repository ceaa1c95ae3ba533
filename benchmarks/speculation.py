"""`switchyard bench speculation`: answers with guessed tokens against the same answers one token at a time.

What a model says depends on the model, and those with random weights say nothing, so the answers are given: real
texts, token by token.  Acceptance is thus that of real texts, and what a step costs is measured; only the routing of
random weights is more spread than that of trained ones.

Both ways take turns every few tokens of one answer: how fast a shared machine is changes within seconds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from engine.batch_files import rows as edited_module
from engine.bench.report import Report, in_turn
from engine.common import clock
from engine.common.config import EngineConfig
from engine.devices import device as written_module
from engine.families import family as told_module
from engine.planner import placement as summed_module
from engine.runtime.decode.drafter import Guess
from engine.runtime.decode.generation import drained
from engine.runtime.decode.kv_session import KvSession
from engine.runtime.decode.speculation import Speculation, StepPrices
from engine.runtime.decode.step_model import MOST_ROWS
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel

_SPACE = " "
_TURN = 8
"""Tokens."""
_PIECES = re.compile(r" ?[A-Za-z]+|_+|\d|\s+|[^\w\s]|\w")


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """What to run.

    Attributes:
        tokens: of each answer, at most.
        prompt_tokens: at most.
    """

    tokens: int
    prompt_tokens: int
    repeats: int


def bench_speculation(config: EngineConfig, plan: SpeculationPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds a row per kind of answer: tokens per second, against single tokens, in turn."""
    say("loading the model")
    if config.speculation == "off":
        config = replace(config, speculation="auto")
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        prices = StepPrices()
        vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
        for name, prompt, answer in answers(tokens_of(loaded.tokenizer, vocabulary), plan):
            both = Both(loaded, prices, prompt, answer)
            turns = {name: lambda _repeat, both=both: both.run()}
            found = in_turn(turns, plan.repeats, report, say)[name]
            guessed, single = ([rates[which] for rates in found] for which in (0, 1))
            say(f"{both.guessed} tokens guessed, {both.accepted} of them accepted")
            ratios = ", ".join(f"{prices.ratio(tokens):.2f}" for tokens in range(2, MOST_ROWS + 1))
            say(f"steps of 2, 3, ... tokens took {ratios} times as long as those of one")
            report.add(name, guessed, "tokens/s", peer="single tokens", peer_values=single)
    finally:
        loaded.close()


class GuessedSteps:
    """The steps of an answer whose tokens are known, over a session's cache, with guesses.

    Args:
        session: holds what the answer continues: the answer's first logits are there.
    """

    def __init__(self, session: KvSession, prices: StepPrices, prefix: Sequence[int], most_tokens: int) -> None:
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


class Both:
    """One answer, both ways in turn.

    Attributes:
        guessed, accepted: tokens of the last run.
    """

    def __init__(self, loaded: LoadedModel, prices: StepPrices, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._loaded, self._prices, self._prompt, self._answer = loaded, prices, prompt, answer
        self._sessions = KvSession(loaded), KvSession(loaded, guesses=False)
        self.guessed = self.accepted = 0

    def run(self) -> tuple[float, float]:
        """Tokens per second with guesses, and without."""
        seconds = [0.0, 0.0]
        with torch.inference_mode():
            for session in self._sessions:
                drained(session.read(self._prompt, lambda _done, _total: None, lambda: False))
            guessing = GuessedSteps(self._sessions[0], self._prices, self._prompt, len(self._answer))
            ways: list[GuessedSteps | KvSession] = [guessing, self._sessions[1]]
            with self._loaded.token_by_token():
                for turn in range(-(-len(self._answer) // _TURN)):
                    for way in (turn % 2, 1 - turn % 2):  # what comes second finds weights in the processor's cache
                        begun_s = perf_counter()
                        for token in self._answer[turn * _TURN : (turn + 1) * _TURN]:
                            ways[way].step(torch.tensor([[token]], device=self._loaded.device), token).argmax().item()
                        seconds[way] += perf_counter() - begun_s
                guessing.settle()
        self.guessed, self.accepted = guessing.speculation.guessed, guessing.speculation.accepted
        return len(self._answer) / seconds[0], len(self._answer) / seconds[1]


def tokens_of(tokenizer: Any, vocabulary: int) -> Callable[[str], list[int]]:
    """What turns text into tokens.

    A tokenizer that knows single letters only, as synthetic models have it, would make texts repeat themselves in
    other ways than they do: of these models, to which all tokens mean the same, words and signs are tokens.
    """
    if len(tokenizer(_PIECES.pattern)["input_ids"]) < len(_PIECES.pattern):
        return lambda text: list(tokenizer(text)["input_ids"])
    known: dict[str, int] = {}
    return lambda text: [known.setdefault(piece, len(known)) % vocabulary for piece in _PIECES.findall(text)]


def answers(tokens: Callable[[str], list[int]], plan: SpeculationPlan) -> list[tuple[str, list[int], list[int]]]:
    """Name, prompt and answer of each kind."""

    source, written = inspect.getsource(edited_module), inspect.getsource(written_module)
    summed, told = _prose(inspect.getsource(summed_module)), _prose(inspect.getsource(told_module))
    asked_to_edit = f"Rename the class Constraint to Condition in this file.\n\n{source}"
    asked_to_sum = f"Which of these sentences matter most?\n\n{summed}"
    return [
        (name, tokens(prompt)[: plan.prompt_tokens], tokens(answer)[: plan.tokens])
        for name, prompt, answer in (
            ("an answer that edits code", asked_to_edit, source.replace("Constraint", "Condition")),
            ("an answer that quotes sentences", asked_to_sum, _quoted(summed)),
            ("an answer in prose that quotes nothing", asked_to_edit, told),
            ("an answer in code that quotes nothing", asked_to_sum, written),
        )
    ]


def _prose(source: str) -> str:
    return _SPACE.join(_SPACE.join(re.findall(r'"""(.*?)"""', source, re.DOTALL)).split())


def _quoted(text: str) -> str:
    """Every third sentence, each with words of another between."""
    sentences = re.split(r"(?<=\.) ", text)[::3]
    begins = ("First of all, it says: ", "It goes on to say that ", "Another point is this: ", "And it notes that ")
    return _SPACE.join(begins[number % len(begins)] + sentence for number, sentence in enumerate(sentences))
