"""Beam search over one prompt: at every step the best continuations of all live sequences survive.

The scores and the decisions are those of transformers' `generate(num_beams=B)` with its defaults (length penalty 1,
early stopping off): sequences are compared by log-probability per generated token.  Tokens are kept as parent pointers
instead of copied sequences, and caches are reordered only when beams change places.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from engine.common.chat import FinishReason
from engine.common.config import SamplingParams
from engine.runtime.decode.detokenizer import decode_text
from engine.runtime.decode.sampling import penalise_repetition
from engine.runtime.decode.sequence import Sequence, StopStrings, alone_with, check_finite, dry_penalty, of_one

_NEVER = -1.0e9
"""Score of what must not be chosen, as in transformers."""

_Result = TypeVar("_Result")


class BeamStep(NamedTuple):
    """The next token of each beam, which goes on from what beam `sources[i]` was."""

    tokens: list[int]
    sources: list[int]


Beams = Generator[BeamStep, torch.Tensor, _Result]
"""A search: it is sent logits [B, V] after each step."""


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """A sequence as its last token and what came before; `None` is the bare prompt."""

    token: int
    before: _Hypothesis | None

    def ids(self) -> list[int]:
        tokens = []
        node: _Hypothesis | None = self
        while node is not None:
            tokens.append(node.token)
            node = node.before
        return tokens[::-1]


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The best sequence found.

    Attributes:
        ids: its generated tokens, an end token included.
        finished: it ended by itself; otherwise it was cut off by length or by being cancelled.
        score: its log-probability divided by its length.
        steps: tokens generated per beam, whether or not they are part of `ids`.
        cancelled: the search was stopped before it was over.
    """

    ids: list[int]
    finished: bool
    score: float
    steps: int
    cancelled: bool


def decode_beams(logits: torch.Tensor, asked: Sequence, prefix: list[int]) -> Beams[FinishReason]:
    """Finds the best answer from logits [1, V] after a prompt, and why it ends; its text comes at the end, since until
    then another beam may win.

    Args:
        prefix: tokens that it continues.
    """
    sampling, tokenizer, end_ids = asked.request.sampling, asked.tokenizer, asked.end_ids

    # A token is at least a byte, but for special ones: the end of the answer that can hold a new stop string.
    tail = max((len(text.encode()) for text in asked.stop), default=0) + 16

    def ends_in_stop(ids: list[int]) -> bool:
        text = decode_text(tokenizer, ids[-tail:])
        return any(entry in text for entry in asked.stop)

    def after_step(length: int) -> bool:
        asked.tell("", length)
        return asked.request.cancelled()

    result = yield from beam_search(
        logits,
        width=sampling.beams,
        max_tokens=asked.max_tokens,
        end_ids=end_ids,
        adjust=_beam_penalties(prefix, asked.earlier, sampling, end_ids, tokenizer),
        ends_in_stop=alone_with(ends_in_stop) if asked.stop else None,
        after_step=alone_with(after_step),
    )
    stops = StopStrings(asked.stop)
    ids = [token for token in result.ids if token not in end_ids]
    text, stopped = stops.feed(alone_with(decode_text)(tokenizer, ids))
    if not stopped:
        text += stops.flush()
    reason: FinishReason
    if result.cancelled:
        reason = "cancelled"
    elif stopped:
        reason = "stop_string"
    else:
        reason = "stop" if result.finished else asked.reached
    asked.tell(text, len(result.ids))
    asked.become(result.ids, text)
    return reason


def beam_search(
    first_logits: torch.Tensor,
    *,
    width: int,
    max_tokens: int,
    end_ids: frozenset[int],
    adjust: Callable[[torch.Tensor, list[list[int]]], torch.Tensor] | None = None,
    ends_in_stop: Callable[[list[int]], bool] | None = None,
    after_step: Callable[[int], bool] | None = None,
) -> Beams[BeamResult]:
    """Searches with `width` beams for at most `max_tokens` tokens.

    Args:
        first_logits: logits [1, V] after the prompt.
        end_ids: tokens that finish a sequence.
        adjust: changes log-probabilities [B, V], given each beam's generated tokens (penalties).
        ends_in_stop: whether these generated tokens complete a stop string, which finishes a sequence too.
        after_step: called with the number of tokens so far after each; true cancels.
    """
    device = first_logits.device
    live: list[_Hypothesis | None] = [None] * width
    # All beams start as one: only the first counts, or they would all choose the same tokens.
    live_scores = torch.full((width, 1), _NEVER, device=device)
    live_scores[0] = 0.0
    finished: list[tuple[float, _Hypothesis, bool]] = []
    candidates_kept = max(2, 1 + len(end_ids)) * width
    logits = first_logits.expand(width, -1)

    for length in range(1, max_tokens + 1):
        with of_one():
            check_finite(logits.amax(dim=-1), length - 1)
        log_probs = logits.float().log_softmax(dim=-1)
        if adjust is not None:
            log_probs = adjust(log_probs, [node.ids() if node is not None else [] for node in live])
        vocabulary = log_probs.shape[-1]
        scores = (log_probs + live_scores).flatten()
        best = scores.topk(min(candidates_kept, scores.shape[0]))
        sums = best.values.tolist()
        nodes = [(index // vocabulary, index % vocabulary) for index in best.indices.tolist()]

        ended = [token in end_ids for _, token in nodes]
        if ends_in_stop is not None:
            for rank, (parent, token) in enumerate(nodes):
                ended[rank] = ended[rank] or ends_in_stop(_Hypothesis(token, live[parent]).ids())
        last = length == max_tokens

        # Only the first `width` candidates may finish: the others stand by to keep `width` sequences alive.
        for rank in range(min(width, len(nodes))):
            if ended[rank] or last:
                parent, token = nodes[rank]
                finished.append((sums[rank] / length, _Hypothesis(token, live[parent]), ended[rank]))
        finished.sort(key=lambda entry: entry[0], reverse=True)
        del finished[width:]
        if last:
            break

        going_on = [rank for rank in range(len(nodes)) if not ended[rank]][:width]
        if not going_on:
            break
        # With a tiny vocabulary there may be too few candidates; a repeated one then counts for nothing.
        padding = [going_on[0]] * (width - len(going_on))
        chosen = going_on + padding
        live = [_Hypothesis(nodes[rank][1], live[nodes[rank][0]]) for rank in chosen]
        live_scores = best.values[torch.tensor(chosen, device=device)].unsqueeze(-1)
        if padding:
            live_scores[len(going_on) :] = _NEVER
        sources = [nodes[rank][0] for rank in chosen]

        # Scores per token only fall, it is assumed: the best live sequence as it is now must beat the worst finished.
        if len(finished) == width and float(live_scores[0]) / length <= finished[-1][0]:
            break
        if after_step is not None and after_step(length):
            return _best(finished, live[0], float(live_scores[0]) / length, length, cancelled=True)
        logits = yield BeamStep([nodes[rank][1] for rank in chosen], sources)
    return _best(finished, live[0], float(live_scores[0]), length, cancelled=False)


def _best(
    finished: list[tuple[float, _Hypothesis, bool]],
    live: _Hypothesis | None,
    live_score: float,
    steps: int,
    *,
    cancelled: bool,
) -> BeamResult:
    if finished:
        score, node, ended = finished[0]
        return BeamResult(node.ids(), ended, score, steps, cancelled)
    return BeamResult(live.ids() if live is not None else [], False, live_score, steps, cancelled)


def _beam_penalties(
    prefix: list[int], earlier: int, sampling: SamplingParams, end_ids: frozenset[int], tokenizer: Any
) -> Callable[[torch.Tensor, list[list[int]]], torch.Tensor] | None:
    """Repetition penalty and DRY, each beam by its own tokens; end tokens are never penalised."""
    penalty = sampling.repetition_penalty
    if penalty == 1 and not sampling.uses_dry:
        return None
    counted = [token for token in prefix[earlier:] if token not in end_ids]

    def adjust(log_probs: torch.Tensor, generated: list[list[int]]) -> torch.Tensor:
        if penalty != 1:
            seen = torch.tensor([[*counted, *ids] for ids in generated], device=log_probs.device, dtype=torch.long)
            log_probs = penalise_repetition(log_probs, seen, penalty)
        if not sampling.uses_dry:
            return log_probs
        # From its beginning for every beam and step: beams change places, and are slow anyway.
        rows = []
        for row, ids in enumerate(generated):
            dry = dry_penalty(prefix, ids, sampling, end_ids, tokenizer)
            assert dry is not None
            rows.append(dry.apply(log_probs[row : row + 1]))
        return torch.cat(rows)

    return alone_with(adjust)
