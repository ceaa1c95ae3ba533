"""What went wrong on a device, as one sentence."""

from __future__ import annotations

import logging
import traceback

import torch

from engine.common.errors import EngineError, ErrorCode

_log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch says it in one way for the CPU and in another for the rest."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def as_engine_error(error: BaseException, stream: str) -> EngineError:
    """The error to show for what submitted work raised.  It keeps no traceback: its frames would keep tensors alive."""
    if isinstance(error, EngineError):
        return fresh(error)
    if is_out_of_memory(error):
        return EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{stream} ran out of memory: close other programs, or allow the model less memory or a shorter context.",
        )
    # As text: whoever keeps log records would keep the frames too.
    _log.error("work on %s failed\n%s", stream, "".join(traceback.format_exception(error)))
    text = (str(error).strip().splitlines() or [""])[0]
    return EngineError(
        ErrorCode.INTERNAL,
        f"Work on {stream} failed ({type(error).__name__}: {text}): try again, and report it if that does not help.",
    )


def fresh(error: EngineError) -> EngineError:
    """An equal error for another one to raise: a shared one would keep the frames of whoever raised it last."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def closed_error(stream: str) -> EngineError:
    """What waiters are told of work that a closing device did not do."""
    return EngineError(ErrorCode.DEVICE_UNAVAILABLE, f"{stream} was closed: load the model again.")


def cancelled_error(stream: str) -> EngineError:
    """What waiters are told of work that was taken back."""
    return EngineError(ErrorCode.INTERNAL, f"Work on {stream} was cancelled, but its result was asked for: try again.")
