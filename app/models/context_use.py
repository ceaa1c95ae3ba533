"""How full a chat's context is, and which of its turns could make room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NEAR_SHARE, FULL_SHARE = 0.75, 0.9
KEPT_SHARE = 0.5
"""Of the context, that turns which stay as they are may take after folding."""


class Level(Enum):
    FREE = "free"
    NEAR = "near"
    FULL = "full"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class ContextUse:
    used: int
    limit: int
    is_about: bool = True

    @property
    def share(self) -> float:
        return self.used / max(self.limit, 1)

    @property
    def level(self) -> Level:
        """OVER: a prompt of that length cannot be read."""
        if self.used >= self.limit:
            return Level.OVER
        return Level.FULL if self.share >= FULL_SHARE else Level.NEAR if self.share >= NEAR_SHARE else Level.FREE


def turns_to_fold(tokens: Sequence[int], ends: Sequence[bool], room: int) -> int:
    """How many of the first turns to fold, so that at most `room` tokens of turns are left; 0 if none can be.

    Args:
        tokens: of each turn.
        ends: whether a turn is an answer, after which a question can follow.
    """
    left, last = sum(tokens), 0
    for number, (size, is_end) in enumerate(zip(tokens, ends, strict=True), 1):
        left -= size
        if is_end:
            last = number
            if left <= room:
                break
    return last
