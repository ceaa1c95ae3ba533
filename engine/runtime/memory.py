"""Whether a model fits, found out before anything is allocated."""

from __future__ import annotations

import psutil

from engine.errors import EngineError, ErrorCode
from engine.hardware.cgroup import memory_limits
from engine.planner.footprint import without_headroom


def available_ram(budget: int | None = None) -> int:
    """Bytes of RAM that may be allocated now: what the machine, its control groups and `budget` allow."""
    free = int(psutil.virtual_memory().available)
    _, left = memory_limits()
    if left is not None:
        free = min(free, left)
    return free if budget is None else min(free, budget)


def usable_ram(budget: int | None = None) -> int:
    """Bytes of weights and of working memory that `require_ram` would let pass."""
    usable = without_headroom(available_ram())
    return usable if budget is None else min(usable, budget)


def require_ram(name: str, needed: int, budget: int | None = None, *, even: str = "") -> None:
    """Refuses a model that does not fit.

    Args:
        name: the model's, for the message.
        needed: bytes of weights and of working memory while loading.
        budget: bytes that the user allows, if any.
        even: how the need has been made as small as it is, if that is so, for the message.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`, with both figures.
    """
    free = available_ram()
    headroom = free - without_headroom(free)
    if needed > free - headroom:
        raise EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{name} needs {gigabytes(needed + headroom)} of RAM{even}, but only {gigabytes(free)} are free: "
            "close other programs or choose a smaller model.",
        )
    if budget is not None and needed > budget:
        raise EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{name} needs {gigabytes(needed)} of RAM{even}, more than the {gigabytes(budget)} that the RAM budget "
            "allows: raise the budget or choose a smaller model.",
        )


def gigabytes(count: int) -> str:
    """A size for people: `12.3 GB`, `85 MB` (decimal units)."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(count / 1e6, 1):.0f} MB"
