"""DRY, "don't repeat yourself": the penalty that ends loops, as in KoboldCpp and llama.cpp.

A token that would prolong a repetition - the last n tokens also occur earlier, and this token came after them there -
loses `multiplier * base^(n - allowed_length)` (p-e-w, text-generation-webui #5677; pi6am, koboldcpp #982, whose rules
for sequence breakers these are).  The longest repetition that a token would prolong counts.

The lengths of all repetitions come from the reverse Z-algorithm once, for the prompt.  From then on a new token makes
every repetition that it prolongs one longer and ends the others: a single pass over the history, which numpy does in
microseconds for thousands of tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from engine.common.config import SamplingParams

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
        """The answer has one token more."""
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
        """Logits [B, V] less the penalties."""
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
