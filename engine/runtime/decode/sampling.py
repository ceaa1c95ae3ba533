"""How the next token is chosen from logits: pure functions, in the order of llama.cpp's default chain.

A bias, penalties for what was said already, DRY, what the answer must satisfy, top-k, top-p, min-p,
temperature, then one draw: what is unlikely is dropped by the model's own probabilities, and a high temperature does
not let it back in.  The vocabulary (49k to 200k entries) is never sorted when a small top-k, or the small mass of
unlikely tokens, makes it unnecessary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from engine.common.config import SamplingParams
from engine.runtime.decode.generation import Chances

Chooser = Callable[[torch.Tensor], torch.Tensor]
"""Logits [1, V] to the chosen token [1, 1] int64, on the same device."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be drawn.

    Attributes:
        probabilities: [m] float32, summing to one.
        token_ids: [m] int64; `None` if they are 0, 1, ..., V - 1.
    """

    probabilities: torch.Tensor
    token_ids: torch.Tensor | None


def greedy_token(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token [B, 1] of logits [B, V]; of equals, the one that `torch.argmax` takes in float32."""
    if logits.device.type == "cpu" and logits.shape[0] == 1:
        # The same token, several times faster: numpy's argmax is vectorised, torch's is not.
        return torch.tensor([[int(logits[0].float().numpy().argmax())]])
    return logits.float().argmax(dim=-1, keepdim=True)


def penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits [B, V] with those of the token ids `seen` [B, n] divided by `penalty` (multiplied, where negative).

    An id that occurs several times is penalised once (CTRL, Keskar et al. 2019, section 4.1).
    """
    chosen = logits.gather(-1, seen)
    largest = torch.finfo(chosen.dtype).max
    chosen = torch.where(chosen < 0, chosen * penalty, chosen / penalty).clamp(-largest, largest)
    return logits.scatter(-1, seen, chosen)


def penalise_presence(logits: torch.Tensor, ids: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits [B, V] less OpenAI's presence and frequency penalties for the tokens `ids` [n] of the answer so far."""
    counts = torch.bincount(ids, minlength=logits.shape[-1]).to(logits.device, torch.float32)
    return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)


def bias_vector(bias: Sequence[tuple[int, float]], logits: torch.Tensor) -> torch.Tensor:
    """What `bias` adds to logits [B, V], as [V] float32; ids beyond the vocabulary count for nothing."""
    known = [(token, value) for token, value in bias if token < logits.shape[-1]]
    ids = torch.tensor([token for token, _ in known], dtype=torch.long, device=logits.device)
    added = torch.tensor([value for _, value in known], dtype=torch.float32, device=logits.device)
    return torch.zeros(logits.shape[-1], device=logits.device).index_add(0, ids, added)


def chances_of(logits: torch.Tensor, token_id: int, top: int) -> Chances:
    """How likely a token was by logits [V], and the `top` most likely ones."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.topk(min(top, logprobs.shape[-1]))
    likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Chances(token_id, float(logprobs[token_id]), likeliest)


def candidates(logits: torch.Tensor, sampling: SamplingParams) -> Candidates:
    """What top-k, top-p and min-p leave of logits [V], none of them NaN or plus infinity.

    Top-k keeps exactly k tokens; of equally likely ones at its edge, any.
    """
    logits = logits.float()
    vocabulary = logits.shape[-1]
    token_ids: torch.Tensor | None = None
    ordered = False
    if 0 < sampling.top_k < vocabulary:
        logits, token_ids = logits.topk(sampling.top_k)
        ordered = True
    if sampling.top_p == 1 and sampling.min_p == 0:
        # From 0 down, so that nothing becomes infinite that is divided by little.
        return Candidates(((logits - logits.max()) / sampling.temperature).softmax(dim=-1), token_ids)

    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        if not ordered:
            probabilities, token_ids = _most_likely(probabilities, sampling.top_p)
        before = probabilities.cumsum(dim=-1) - probabilities
        # The most likely token has nothing before it, so it always stays.
        keep = int((before < sampling.top_p).sum())
        probabilities = probabilities[:keep]
        token_ids = token_ids[:keep] if token_ids is not None else None
        ordered = True

    if sampling.min_p > 0:
        most_likely = probabilities[0] if ordered else probabilities.max()
        kept = (probabilities >= sampling.min_p * most_likely).nonzero().squeeze(-1)
        probabilities = probabilities[kept]
        token_ids = token_ids[kept] if token_ids is not None else kept
    return Candidates((probabilities.log() / sampling.temperature).softmax(dim=-1), token_ids)


def _most_likely(probabilities: torch.Tensor, mass: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens of [V] in falling order, enough of them to hold `mass`: ([m] probabilities, [m] ids).

    Tokens below (1 - mass) / V cannot reach 1 - mass even all together, so they are dropped before anything is sorted;
    half of that is the limit, as all may be equally likely but for rounding.
    """
    ids = (probabilities >= (1 - mass) / (2 * probabilities.shape[-1])).nonzero().squeeze(-1)
    kept = probabilities[ids]
    # On the CPU numpy's sort is vectorised, unlike torch's.
    on_cpu = kept.device.type == "cpu"
    order = torch.from_numpy((-kept.numpy()).argsort()) if on_cpu else kept.argsort(descending=True)
    return kept[order], ids[order]


def draw(choice: Candidates, generator: torch.Generator) -> torch.Tensor:
    """One token id [1, 1] int64, drawn with the candidates' probabilities."""
    # By the inverse of the cumulative distribution: `torch.multinomial` takes over ten times as long on a vocabulary.
    cumulative = choice.probabilities.cumsum(dim=-1, dtype=torch.float64)
    point = torch.rand(1, generator=generator, dtype=torch.float64, device=cumulative.device) * cumulative[-1]
    # `right`: a token of probability zero adds nothing to the sum, so no point can fall on it.
    index = torch.searchsorted(cumulative, point, right=True).clamp_(max=cumulative.shape[-1] - 1)
    token = index if choice.token_ids is None else choice.token_ids[index]
    return token.view(1, 1)


def seeded_generator(seed: int | None, device: torch.device) -> torch.Generator:
    """A source of randomness that repeats itself for the same seed; `None` draws a fresh seed."""
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        # Any integer is a seed: torch takes only 64 bits of it.
        generator.manual_seed(seed % 2**63)
    return generator


def make_chooser(sampling: SamplingParams, device: torch.device) -> Chooser:
    if sampling.is_greedy:
        return greedy_token
    generator = seeded_generator(sampling.seed, device)
    return lambda logits: draw(candidates(logits[0], sampling), generator)


Ids = npt.NDArray[np.int64]
Breakers = Mapping[int, tuple[tuple[int, ...], ...]]
"""First token of a sequence breaker -> all its continuations; `()` if the token alone is one."""

_MOST_CHARACTERS, _MOST_TAIL = 40, 20
"""Of a breaker, and of the tokens that continue it: longer ones are cut, as in llama.cpp."""
_MOST_KNOWN = 16
"""Sets of breakers that are remembered."""
_LOG_LARGEST_FLOAT = 88.7228391
_MOST_PENALTY = 1e30
"""Of one token: far above any logit, yet finite, so that a token which a constraint forces can still be chosen."""

_known_breakers: WeakKeyDictionary[Any, dict[tuple[str, ...], Breakers]] = WeakKeyDictionary()


class DryPenalty:
    """The penalties of one answer while it grows.

    Args:
        history: tokens that it continues.
        breakers: see `breakers_of`.
        spared: tokens that are never penalised, such as those that end an answer.
    """

    def __init__(
        self, history: Sequence[int], sampling: SamplingParams, breakers: Breakers, spared: frozenset[int]
    ) -> None:
        self._multiplier, self._base = sampling.dry_multiplier, sampling.dry_base
        self._allowed, self._range = sampling.dry_allowed_length, sampling.dry_range
        self._breakers = breakers
        self._spared = np.array(sorted(spared.union(head for head, tails in breakers.items() if () in tails)))
        self._most_exponent = int(_LOG_LARGEST_FLOAT / math.log(self._base)) if self._base > 1.000001 else 0
        self._longest_tail = max((len(tail) for tails in breakers.values() for tail in tails), default=0)
        self._last_breaker = (-1, 0)
        """Where it begins and how many tokens it has after that; all before `_settled` have been looked at."""
        self._settled = 0
        self._length = len(history)
        self._ids: Ids = np.zeros(2 * self._length + 64, np.int64)
        self._ids[: self._length] = history
        # [i]: how many tokens up to and including the i-th equal as many at the end.
        self._repeats: Ids = np.zeros_like(self._ids)
        self._repeats[: self._length] = _z_lengths(list(history)[::-1])[::-1]

    def append(self, token_id: int) -> None:
        length = self._length
        if length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._repeats = np.concatenate([self._repeats, np.zeros_like(self._repeats)])
        before = self._repeats[: length - 1] + 1 if length else self._repeats[:0]
        self._repeats[1:length] = before
        self._repeats[:1] = 1
        self._repeats[:length] *= self._ids[:length] == token_id
        self._ids[length] = token_id
        self._length += 1

    def penalties(self) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Token ids [m] and what the logit of each loses [m], both empty if nothing is repeated."""
        window = self._length if self._range < 0 else min(self._range, self._length)
        if window <= self._allowed or window < 2:
            return _NOTHING
        limit = self._limit(window)
        if limit < self._allowed:
            return _NOTHING
        first, last = self._length - window, self._length - 1
        # Neither before the window nor across a breaker.
        lengths = np.minimum(self._repeats[first:last], np.arange(1, window))
        lengths = np.minimum(lengths, limit)
        (at,) = (lengths >= self._allowed).nonzero()
        if not len(at):
            return _NOTHING
        tokens, lengths = self._ids[first + 1 + at], lengths[at]
        ascending = lengths.argsort(kind="stable")
        longest = dict(zip(tokens[ascending].tolist(), lengths[ascending].tolist(), strict=True))
        ids = np.fromiter(longest, np.int64, len(longest))
        repeated = np.fromiter(longest.values(), np.int64, len(longest))
        kept = ~np.isin(ids, self._spared)
        return ids[kept], self._penalty(repeated[kept])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        ids, penalties = self.penalties()
        if not len(ids):
            return logits
        at = torch.from_numpy(ids).to(logits.device)
        logits = logits.clone()
        logits[:, at] -= torch.from_numpy(penalties).to(logits)
        return logits

    def _penalty(self, repeated: Ids) -> npt.NDArray[np.float32]:
        exponents = repeated - self._allowed
        if self._most_exponent:
            exponents = np.minimum(exponents, self._most_exponent)
        penalties = self._multiplier * self._base ** exponents.astype(np.float64)
        return np.minimum(penalties, _MOST_PENALTY).astype(np.float32)

    def _limit(self, window: int) -> int:
        """Tokens since the last breaker: a longer repetition counts as one of this length."""
        last = self._length - 1
        # Which breakers begin at a token is settled once the longest could have been completed.
        for at in range(last, max(last - self._longest_tail, last - window, -1), -1):
            if (tail := self._breaker_at(at)) is not None:
                return last - at - tail
        while self._settled <= last - self._longest_tail:
            if (tail := self._breaker_at(self._settled)) is not None:
                self._last_breaker = (self._settled, tail)
            self._settled += 1
        at, tail = self._last_breaker
        return last - at - tail if at > last - window else window

    def _breaker_at(self, at: int) -> int | None:
        """How many tokens after the `at`-th belong to the longest breaker that begins there; `None` if none does."""
        ids = self._ids
        tails = self._breakers.get(int(ids[at]), ())
        whole = [
            len(tail)
            for tail in tails
            if at + len(tail) < self._length and tuple(ids[at + 1 : at + 1 + len(tail)].tolist()) == tail
        ]
        return max(whole, default=None)


_NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.float32))


def _z_lengths(ids: list[int]) -> list[int]:
    """[i]: how many of the tokens from the i-th on equal as many from the beginning; [0] is left 0.

    Main and Lorentz 1984; linear, since `end` never moves back.
    """
    lengths = [0] * len(ids)
    begin = end = 0
    for i in range(1, len(ids)):
        length = min(end - i, lengths[i - begin]) if i < end else 0
        while i + length < len(ids) and ids[length] == ids[i + length]:
            length += 1
        lengths[i] = length
        if i + length > end:
            begin, end = i, i + length
    return lengths


def breakers_of(tokenizer: Any, breakers: tuple[str, ...], encode: Callable[[str], list[int]]) -> Breakers:
    """Every way in which tokens can contain a breaker: one token that has it inside, or one that ends with its
    beginning, before the tokens of the rest.

    Args:
        tokenizer: its vocabulary is decoded at the first call with these breakers.
        encode: a text's tokens, without special ones.
    """
    known = _known_breakers.setdefault(tokenizer, {})
    if breakers not in known:
        if len(known) >= _MOST_KNOWN:
            known.pop(next(iter(known)))
        known[breakers] = _ways(_words(tokenizer), [text[:_MOST_CHARACTERS] for text in breakers], encode)
    return known[breakers]


def _ways(words: Sequence[str], breakers: Sequence[str], encode: Callable[[str], list[int]]) -> Breakers:
    """The same by the text of every token, each of which is looked at once for all breakers."""
    begun: dict[str, list[str]] = {}
    for breaker in dict.fromkeys(breakers):
        for size in range(1, len(breaker)):
            begun.setdefault(breaker[:size], []).append(breaker)
    longest = max(map(len, begun), default=0)
    inside = re.compile("|".join(map(re.escape, breakers)) or "(?!)")
    tails: dict[str, tuple[int, ...]] = {}
    found: dict[int, dict[tuple[int, ...], None]] = {}
    for token, word in enumerate(words):
        if has_one := inside.search(word):
            found.setdefault(token, {})[()] = None
        for size in range(1, min(longest, len(word)) + 1):
            for breaker in begun.get(word[-size:], ()):
                if has_one and breaker in word:
                    continue
                if (rest := breaker[size:]) not in tails:
                    tails[rest] = tuple(encode(rest)[:_MOST_TAIL])
                found.setdefault(token, {})[tails[rest]] = None
    for breaker in breakers:
        if not breaker.isascii():
            # Its characters may be spread over tokens that are no text by themselves.
            head, *rest_ids = encode(breaker) or [-1]
            found.setdefault(head, {})[tuple(rest_ids[:_MOST_TAIL])] = None
    return {token: tuple(ways) for token, ways in found.items()}


def _words(tokenizer: Any) -> list[str]:
    """The text of every token by itself."""
    ids = [[index] for index in range(len(tokenizer))]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "decode_batch"):
        return list(backend.decode_batch(ids, skip_special_tokens=False))
    return [str(tokenizer.decode(one, skip_special_tokens=False)) for one in ids]
