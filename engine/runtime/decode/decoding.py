"""The decode loops: one token after another, or several beams, until something ends the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from engine.common.chat import FinishReason
from engine.common.config import SamplingParams
from engine.runtime.decode.beam_search import BeamModel, beam_search
from engine.runtime.decode.detokenizer import decode_text
from engine.runtime.decode.generation import CancelCheck, ProgressCallback, TextCallback, TokenConstraint
from engine.runtime.decode.sampling import penalise_repetition
from engine.runtime.decode.sequence import AnswerLimits, AnswerSequence, StopStrings
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER, seconds_ns


class Session(Protocol):
    """A model with its caches, whatever its architecture, that reads a prompt and then takes one token at a time."""

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
    sampling: SamplingParams,
    limits: AnswerLimits,
    prefix: Sequence[int],
    tokenizer: Any,
    on_text: TextCallback,
    cancelled: CancelCheck,
    constraint: TokenConstraint | None = None,
) -> Decoded:
    """One token at a time, starting from the logits [1, V] after the prompt.

    Args:
        prefix, constraint: see `AnswerSequence`.
    """
    answer = AnswerSequence(prefix, sampling, limits, tokenizer, constraint, logits.device)
    first_s = last_s = 0.0
    reason: FinishReason | None = None
    while reason is None:
        token = answer.choose(logits)
        token_id = int(token)
        last_s = perf_counter()
        if RECORDER.on:
            RECORDER.phase(lanes.DECODE if answer.ids else lanes.SAMPLE, 1, seconds_ns(last_s))
        if not answer.ids:
            first_s = last_s
        text, reason = answer.take(token_id)
        on_text(text, len(answer.ids))
        if reason is None and cancelled():
            text, reason = answer.end("cancelled")
            on_text(text, len(answer.ids))
        if reason is None:
            logits = session.step(token, token_id)
    return Decoded(answer.ids, answer.text, reason, first_s, last_s, len(answer.ids))


def decode_beams(
    logits: torch.Tensor,
    session: Session,
    sampling: SamplingParams,
    limits: AnswerLimits,
    prefix: Sequence[int],
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
        adjust=_beam_penalty(prefix, sampling.repetition_penalty),
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
