"""Teacher-forced decoding of a fixed text: every contestant computes the same tokens, hence the same experts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.runtime.decode.kv_session import KvSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.runtime.loaded_model import LoadedModel

_FEWEST_STEPS = 3
"""Steps that are always timed."""


@dataclass(frozen=True, slots=True)
class ForcedText:
    """Token ids: the prompt, and the forced continuation."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def random_text(vocabulary: int, prompt: int, answer: int, seed: int = 0) -> ForcedText:
    """Random ids, for a model with random weights."""
    draw = random.Random(seed)
    ids = [draw.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(prompt + answer)]
    return ForcedText(tuple(ids[:prompt]), tuple(ids[prompt:]))


def own_text(loaded: LoadedModel, prompt: Sequence[int], answer: int) -> ForcedText:
    """The prompt and the model's greedy continuation, past the end of its answer."""
    ids: list[int] = []
    with _session(loaded) as session:
        logits, _ = session.prefill(list(prompt), _ignore, _never)
        with loaded.token_by_token():
            for _ in range(answer):
                ids.append(int(logits.argmax()))
                logits = session.step(torch.tensor([[ids[-1]]], device=loaded.device), ids[-1])
    return ForcedText(tuple(prompt), tuple(ids))


def decode_seconds(loaded: LoadedModel, text: ForcedText, at_most_s: float = float("inf")) -> list[float]:
    """Seconds of each decode step, until the answer ends or the steps together have taken `at_most_s`."""
    seconds: list[float] = []
    with _session(loaded) as session:
        session.prefill(list(text.prompt), _ignore, _never)
        with loaded.token_by_token():
            for token in text.answer:
                ids = torch.tensor([[token]], device=loaded.device)
                begun_s = time.perf_counter()
                session.step(ids, token).argmax().item()  # reading the result waits for the card
                seconds.append(time.perf_counter() - begun_s)
                if len(seconds) >= _FEWEST_STEPS and sum(seconds) > at_most_s:
                    break
    return seconds


def prefill_seconds(loaded: LoadedModel, prompt: Sequence[int]) -> float:
    """Seconds from an empty context to the logits after the prompt."""
    with _session(loaded) as session:
        begun_s = time.perf_counter()
        logits, _ = session.prefill(list(prompt), _ignore, _never)
        logits.argmax().item()
        return time.perf_counter() - begun_s


@contextmanager
def _session(loaded: LoadedModel) -> Iterator[KvSession]:
    """A separate context, freed at the end."""
    session = KvSession(loaded)
    try:
        with torch.inference_mode():
            yield session
    finally:
        session.clear()


def _ignore(_done: int, _total: int) -> None:
    pass


def _never() -> bool:
    return False
