"""`switchyard bench speculation`: answers with guessed tokens against the same answers one token at a time.

What a model says depends on the model, and those with random weights say nothing, so the answers are given: every
token is chosen as always, with all others forbidden.  One answer edits the text of its prompt, a Python file of which
one name changes; the other is prose on other things.  Acceptance is thus that of real texts, and what a step costs is
measured; only the routing of random weights is more spread than that of trained ones.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.batch_files import rows as edited_module
from engine.bench.report import Report, row
from engine.common.config import EngineConfig, SamplingParams
from engine.planner import placement as told_module
from engine.runtime.decode.chat_session import ChatSession
from engine.runtime.load.model import load_model

_SPACE = " "


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


class Given:
    """A constraint that one answer satisfies."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._at = ids, 0

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """All but the next token of the answer forbidden."""
        only = torch.full_like(logits, float("-inf"))
        only[self._ids[self._at]] = 0.0
        return only

    def accept(self, token_id: int) -> bool:
        """The answer is complete with its last token."""
        assert token_id == self._ids[self._at]
        self._at += 1
        return self._at == len(self._ids)

    def reset(self) -> None:
        """Begins again."""
        self._at = 0


def bench_speculation(config: EngineConfig, plan: SpeculationPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds a row per kind of answer: tokens per second, against single tokens, in turn."""
    say("loading the model")
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        sessions = {guesses: ChatSession(loaded, speculates=guesses) for guesses in (True, False)}
        for name, prompt, answer in _answers(loaded.tokenizer, plan):
            rates: dict[bool, list[float]] = {True: [], False: []}
            for repeat in range(plan.repeats + 1):
                say(f"{name}, repeat {repeat} of {plan.repeats}" if repeat else f"{name}, warm-up")
                for guesses in (True, False) if repeat % 2 else (False, True):
                    result = sessions[guesses].generate_from_ids(
                        prompt, SamplingParams(max_tokens=len(answer)), constraint=Given(answer), end_ids=frozenset()
                    )
                    assert list(result.token_ids) == answer
                    if repeat:
                        rates[guesses].append(result.tokens_per_s)
                    if guesses and repeat == plan.repeats:
                        say(f"{result.guessed_tokens} tokens guessed, {result.accepted_tokens} of them accepted")
            report.rows.append(row(name, rates[True], "tokens/s", peer="single tokens", peer_values=rates[False]))
    finally:
        loaded.close()


def _answers(tokenizer: object, plan: SpeculationPlan) -> list[tuple[str, list[int], list[int]]]:
    """Name, prompt and answer of each kind."""

    def ids(text: str, most: int) -> list[int]:
        return list(tokenizer(text)["input_ids"])[:most]  # type: ignore[operator]

    source = inspect.getsource(edited_module)
    asked = ids(f"Rename the class Constraint to Condition in this file.\n\n{source}", plan.prompt_tokens)
    edited = ids(source.replace("Constraint", "Condition"), plan.tokens)
    prose = _SPACE.join(_prose(inspect.getsource(told_module)).split())
    return [
        ("an answer that edits its prompt", asked, edited),
        ("an answer that quotes nothing", asked, ids(prose, plan.tokens)),
    ]


def _prose(source: str) -> str:
    return "\n".join(re.findall(r'"""(.*?)"""', source, re.DOTALL))
