"""A job's speed and remaining time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_WINDOW_S = 120.0
_LEAST_S = 3.0
_TELLING_TOKENS = 2
"""Tokens generated per active row before estimating: earlier, prompts take most of the time."""
_PARTS = 6


@dataclass(frozen=True, slots=True)
class Pace:
    """A job's progress.

    Attributes:
        done, failed: rows completed, and those of them that failed.
        total: total rows; None while unknown.
        tokens_per_s: generated over the last two minutes; 0 while unknown.
        remaining_low_s, remaining_high_s: seconds until the end, from the fastest and the slowest part of those two
            minutes, wider while few rows are complete, and at most as if every answer had its maximum length. None
            while unknown; before the first row is complete only the low one is known.
        under_way: rows that currently share each sweep over the weights.
    """

    done: int
    failed: int
    total: int | None
    tokens_per_s: float
    remaining_low_s: float | None
    remaining_high_s: float | None
    under_way: int = 0


class PaceMeter:
    """Measures a job's pace; `now` is any monotonic clock in seconds.

    Args:
        done, failed: rows completed by earlier runs.
        most_tokens: of one answer; None if nothing limits it.
    """

    def __init__(self, done: int, failed: int, now: float, most_tokens: int | None = None) -> None:
        self._done, self._failed = done, failed
        self._most_tokens = most_tokens
        self._tokens = 0
        self._seen: deque[tuple[float, int, int]] = deque([(now, done, 0)])

    def ended(self, *, failed: bool, generated_tokens: int) -> None:
        """One more row is complete."""
        self._done += 1
        self._failed += failed
        self._tokens += generated_tokens

    @property
    def tokens(self) -> int:
        """Tokens generated for rows completed in this run."""
        return self._tokens

    def pace(self, total: int | None, now: float, *, under_way: int = 0, under_way_tokens: int = 0) -> Pace:
        """The progress at `now`.

        Args:
            total: total rows, if known.
            under_way, under_way_tokens: active rows, and the tokens generated for them so far.
        """
        tokens = self._tokens + under_way_tokens
        if now - self._seen[-1][0] >= _WINDOW_S / _PARTS / 4 or len(self._seen) == 1:
            self._seen.append((now, self._done, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW_S:
            self._seen.popleft()
        begun, done_then, tokens_then = self._seen[0]
        elapsed = now - begun
        if elapsed < _LEAST_S:
            return Pace(self._done, self._failed, total, 0.0, None, None, under_way)
        generated = max(0, tokens - tokens_then)
        rate = generated / elapsed if generated >= _TELLING_TOKENS * under_way else 0.0
        low, high = self._remaining(total, now, done_then, elapsed)
        most = self._most_remaining(total, rate, under_way_tokens)
        if most is not None:
            low, high = None if low is None else min(low, most), most if high is None else min(high, most)
        return Pace(self._done, self._failed, total, rate, low, high, under_way)

    def _most_remaining(self, total: int | None, rate: float, under_way_tokens: int) -> float | None:
        """Seconds if every answer reaches its maximum length."""
        if total is None or self._most_tokens is None or rate <= 0:
            return None
        return max(0.0, (total - self._done) * self._most_tokens - under_way_tokens) / rate

    def _remaining(
        self, total: int | None, now: float, done_then: int, elapsed: float
    ) -> tuple[float | None, float | None]:
        if total is None or self._done == done_then:
            return None, None
        left = max(0, total - self._done)
        ended = self._done - done_then
        mean = elapsed / ended
        times = [mean]
        points = [*self._seen, (now, self._done, 0)]
        step = max(1, len(points) // _PARTS)
        for first, last in zip(points[:-step:step], points[step::step], strict=False):
            if last[1] > first[1]:
                times.append((last[0] - first[0]) / (last[1] - first[1]))
        # A part with hardly any completed rows reflects chance, not the machine.
        low, high = max(min(times), mean / 2), min(max(times), mean * 2)
        # Completions are roughly a Poisson process: the rate's relative error is 1 / sqrt(n).
        unsure = 1 + 2 / ended**0.5
        return left * min(low, mean / unsure), left * max(high, mean * unsure)
