"""Cancelling long work: the caller sets a flag, the work raises."""

from __future__ import annotations

from collections.abc import Callable

CancelCheck = Callable[[], bool]
"""Whether to stop now."""


class RequestCancelled(Exception):  # noqa: N818 - not an error: the user asked for it
    """The request was cancelled before it was done.  Nothing half-done is left behind."""


def never_cancelled() -> bool:
    """For callers that let it run."""
    return False
