"""What the decoding loop needs of a model with its caches, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from engine.common.chat import FinishReason
from engine.common.config import SamplingParams
from engine.runtime.decode.beam_search import BeamModel, beam_search
from engine.runtime.decode.detokenizer import IncrementalDetokenizer, decode_text
from engine.runtime.decode.generation import CancelCheck, Constraint, ProgressCallback, TextCallback
from engine.runtime.decode.sampling import make_chooser, penalise_repetition
from engine.runtime.decode.stopping import StopStrings
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER, seconds_ns


class Session(Protocol):
    """A model that reads a prompt and then takes one token at a time."""

    @property
    def tokens(self) -> int:
        """Tokens held in the KV cache."""

    @property
    def bytes(self) -> int:
        """Bytes held by the KV cache."""

    def clear(self) -> None:
        """Frees the KV cache."""

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may follow a prompt of this length; 0 or less if it is too long."""

    def answer_prefix(self, prompt: Sequence[int]) -> list[int]:
        """Tokens that the answer continues: what a repetition penalty counts before the first token."""

    def prefill(
        self, prompt: Sequence[int], on_progress: ProgressCallback, cancelled: CancelCheck
    ) -> tuple[torch.Tensor, int]:
        """Reads the prompt: logits [1, V] after it, and how many of its tokens were reused from the cache."""

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:
        """Appends one token [1, 1] int64, whose id is `token_id`; logits [1, V] after it."""

    def beams(self, width: int) -> BeamModel:
        """`width` sequences that all hold what this session holds; it takes no further `step` for this prompt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an answer.

    Attributes:
        end_ids: tokens that end it.
        stop: strings that end it.
        max_tokens: most tokens to generate, and `reached` is what to call it when they have been.
    """

    end_ids: frozenset[int]
    stop: tuple[str, ...]
    max_tokens: int
    reached: FinishReason


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer and when its tokens came: seconds of `perf_counter`, 0 if there was no token."""

    ids: list[int]
    text: str
    reason: FinishReason
    first_s: float
    last_s: float
    timed_tokens: int


def decode(
    logits: torch.Tensor,
    session: Session,
    answer_prefix: Sequence[int],
    sampling: SamplingParams,
    limits: Limits,
    tokenizer: Any,
    on_text: TextCallback,
    cancelled: CancelCheck,
    constraint: Constraint | None = None,
) -> Decoded:
    """One token at a time, starting from the logits [1, V] after the prompt.

    Args:
        constraint: what the answer must satisfy; it knows of no token yet.
    """
    choose = make_chooser(sampling, logits.device)
    seen = _Seen(answer_prefix, limits.max_tokens, logits.device) if sampling.repetition_penalty != 1 else None
    detokenizer = IncrementalDetokenizer(tokenizer)
    stops = StopStrings(limits.stop)
    end_ids, max_tokens, penalty = limits.end_ids, limits.max_tokens, sampling.repetition_penalty
    ids: list[int] = []
    parts: list[str] = []
    first_s = last_s = 0.0

    while True:
        if seen is not None:
            logits = penalise_repetition(logits.float(), seen.ids(), penalty)
        if constraint is not None:
            logits = constraint.restrict(logits[0].float())[None]
        token = choose(logits)
        token_id = int(token)
        last_s = perf_counter()
        if not ids:
            first_s = last_s
        if RECORDER.on:
            RECORDER.phase(lanes.DECODE if ids else lanes.SAMPLE, 1, seconds_ns(last_s))
        ids.append(token_id)
        if token_id in end_ids:
            reason: FinishReason = "stop"
            break
        complete = constraint is not None and constraint.accept(token_id)
        text, stopped = stops.feed(detokenizer.feed(token_id))
        parts.append(text)
        on_text(text, len(ids))
        if stopped:
            return Decoded(ids, "".join(parts), "stop_string", first_s, last_s, len(ids))
        if complete:
            reason = "stop"
            break
        if len(ids) >= max_tokens:
            reason = limits.reached
            break
        if cancelled():
            reason = "cancelled"
            break
        if seen is not None:
            seen.append(token)
        logits = session.step(token, token_id)

    # A stop string cannot hide in what is flushed but for a character that was still incomplete.
    text, stopped = stops.feed(detokenizer.flush())
    if stopped:
        reason = "stop_string"
    else:
        text += stops.flush()
    parts.append(text)
    on_text(text, len(ids))
    return Decoded(ids, "".join(parts), reason, first_s, last_s, len(ids))


def decode_beams(
    logits: torch.Tensor,
    session: Session,
    answer_prefix: Sequence[int],
    sampling: SamplingParams,
    limits: Limits,
    tokenizer: Any,
    on_text: TextCallback,
    cancelled: CancelCheck,
) -> Decoded:
    """Beam search; the text comes at the end, since until then another beam may win."""
    moments: list[float] = []

    def after_step(length: int) -> bool:
        moments.append(perf_counter())
        if RECORDER.on:
            first = len(moments) == 1
            RECORDER.phase(lanes.SAMPLE if first else lanes.DECODE, 1, seconds_ns(moments[-1]))
        on_text("", length)
        return cancelled()

    result = beam_search(
        logits,
        session.beams(sampling.beams),
        width=sampling.beams,
        max_tokens=limits.max_tokens,
        end_ids=limits.end_ids,
        adjust=_beam_penalty(answer_prefix, sampling.repetition_penalty),
        ends_in_stop=_stop_check(tokenizer, limits.stop),
        after_step=after_step,
    )
    moments.append(perf_counter())
    stops = StopStrings(limits.stop)
    ids = [token for token in result.ids if token not in limits.end_ids]
    text, stopped = stops.feed(decode_text(tokenizer, ids))
    if not stopped:
        text += stops.flush()
    reason: FinishReason
    if result.cancelled:
        reason = "cancelled"
    elif stopped:
        reason = "stop_string"
    else:
        reason = "stop" if result.finished else limits.reached
    on_text(text, len(result.ids))
    return Decoded(result.ids, text, reason, moments[0], moments[-1], len(moments))


class _Seen:
    """Token ids of the context so far, [1, n], grown in place."""

    def __init__(self, prefix: Sequence[int], max_tokens: int, device: torch.device) -> None:
        self._buffer = torch.zeros((1, len(prefix) + max_tokens), dtype=torch.long, device=device)
        self._buffer[0, : len(prefix)] = torch.tensor(prefix, dtype=torch.long, device=device)
        self._length = len(prefix)

    def ids(self) -> torch.Tensor:
        return self._buffer[:, : self._length]

    def append(self, token: torch.Tensor) -> None:
        self._buffer[:, self._length : self._length + 1] = token
        self._length += 1


def _beam_penalty(
    prefix: Sequence[int], penalty: float
) -> Callable[[torch.Tensor, list[list[int]]], torch.Tensor] | None:
    if penalty == 1:
        return None

    def adjust(log_probs: torch.Tensor, generated: list[list[int]]) -> torch.Tensor:
        seen = torch.tensor([[*prefix, *ids] for ids in generated], device=log_probs.device)
        return penalise_repetition(log_probs, seen, penalty)

    return adjust


def _stop_check(tokenizer: Any, stop: tuple[str, ...]) -> Callable[[list[int]], bool] | None:
    if not stop:
        return None
    # A token is at least a byte, but for special ones: the end of the answer that can hold a new stop string.
    tail = max(len(text.encode()) for text in stop) + 16

    def ends_in_stop(ids: list[int]) -> bool:
        text = decode_text(tokenizer, ids[-tail:])
        return any(entry in text for entry in stop)

    return ends_in_stop
