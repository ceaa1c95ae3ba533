"""`switchyard bench speculation`: answers with guessed tokens against the same answers one token at a time.

What a model says depends on the model, and those with random weights say nothing, so the answers are given: real
texts, token by token.  Acceptance is thus that of real texts, and what a step costs is measured; only the routing of
random weights is more spread than that of trained ones.

Both ways take turns, answer by answer: how fast a shared machine is changes within seconds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.batch_files import rows as edited_module
from engine.bench.report import Report, in_turn
from engine.common.config import EngineConfig, SamplingParams
from engine.devices import device as written_module
from engine.families import family as told_module
from engine.planner import placement as summed_module
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.load.model import load_model
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler

_SPACE = " "
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
        vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
        ways = Scheduler(loaded), Scheduler(replace(loaded, speculates=False))
        for name, prompt, answer in answers(tokens_of(loaded.tokenizer, vocabulary), plan):
            said = list[GenerationResult]()

            def both(_repeat: int, prompt: list[int] = prompt, answer: list[int] = answer) -> tuple[float, float]:
                nonlocal said
                said = [_answer(way, prompt, answer) for way in ways]
                return said[0].tokens_per_s, said[1].tokens_per_s

            found = in_turn({name: both}, plan.repeats, report, say)[name]
            guessed, single = ([rates[which] for rates in found] for which in (0, 1))
            say(f"{said[0].guessed_tokens} tokens guessed, {said[0].accepted_tokens} of them accepted")
            report.add(name, guessed, "tokens/s", peer="single tokens", peer_values=single)
        for way in ways:
            way.close()
    finally:
        loaded.close()


class Given:
    """A constraint that leaves one token at each place."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer, self._at = answer, 0

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """That one's."""
        only = torch.full_like(logits, -torch.inf)
        only[self._answer[self._at]] = 0
        return only

    def accept(self, token_id: int) -> bool:
        """Whether that was the last one."""
        assert token_id == self._answer[self._at]
        self._at += 1
        return self._at == len(self._answer)

    def reset(self) -> None:
        """From the first one again."""
        self._at = 0


def _answer(scheduler: Scheduler, prompt: Sequence[int], answer: Sequence[int]) -> GenerationResult:
    sampling = SamplingParams(max_tokens=len(answer))
    request = BatchRequest(0, ids=tuple(prompt), sampling=sampling, constraint=Given(answer), end_ids=frozenset())
    return scheduler.answer(request)


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
