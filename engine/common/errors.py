"""The engine's exceptions: one error type with codes that everybody can rely on, and the user's own cancelling.

Every message is one sentence that says what is wrong, where, and what to do about it; it is shown to the user
unchanged. Long work is cancelled by a flag that the caller sets and the work checks, which then raises. This module
imports nothing heavy, so the window can use it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable identifiers of what went wrong.  Values are part of the protocol: never rename one."""

    # The user can fix it: exit code 2, a calm dialog.
    MODEL_NOT_FOUND = "model_not_found"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    CHECKPOINT_UNSAFE = "checkpoint_unsafe"
    MODEL_UNSUPPORTED = "model_unsupported"
    NOT_ENOUGH_MEMORY = "not_enough_memory"
    DISK_FULL = "disk_full"
    PROMPT_TOO_LONG = "prompt_too_long"
    INVALID_REQUEST = "invalid_request"
    DEVICE_UNAVAILABLE = "device_unavailable"
    DOWNLOAD_FAILED = "download_failed"
    BUSY = "busy"
    ENDPOINT_FAILED = "endpoint_failed"
    PICTURES_NOT_READ = "pictures_not_read"
    # Internal errors: exit code 1, an offer to restart and to report.
    ENGINE_DIED = "engine_died"
    PROTOCOL = "protocol"
    INTERNAL = "internal"

    @property
    def is_users(self) -> bool:
        """Whether the user can fix it (exit code 2) , or it is internal (exit code 1)."""
        return self not in _OURS


_OURS = frozenset({ErrorCode.ENGINE_DIED, ErrorCode.PROTOCOL, ErrorCode.INTERNAL})


class EngineError(Exception):
    """A failure, explained to the user in one sentence.

    Attributes:
        code: what kind of failure, stable across versions.
        message: one clear sentence: what, where, what to do.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


CancelCheck = Callable[[], bool]
"""Whether to stop now."""


class RequestCancelled(Exception):  # noqa: N818 - not an error: the user asked for it
    """The request was cancelled before it was done.  Nothing half-done is left behind."""


def never_cancelled() -> bool:
    """For callers that let it run."""
    return False
