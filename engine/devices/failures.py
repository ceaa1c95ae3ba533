"""Device errors as one-sentence messages."""

from __future__ import annotations

import logging
import traceback

import torch

from engine.common.errors import EngineError, ErrorCode

_log = logging.getLogger(__name__)

_WORDS = (
    *("DefaultCPUAllocator", "not enough memory", "can't allocate memory"),
    *("CUDA error: out of memory", "HIP error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a class for its own of a card, and words for the CPU's and a driver's."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _WORDS)


def is_fault_of_device(error: BaseException) -> bool:
    """Whether a device failed, and not what was computed on it: everybody who uses it is concerned."""
    if isinstance(error, EngineError):
        return error.code is ErrorCode.DEVICE_UNAVAILABLE
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def as_engine_error(error: BaseException, stream: str) -> EngineError:
    """The error for an exception of submitted work, without traceback: its frames would keep tensors alive."""
    if isinstance(error, EngineError):
        return fresh(error)
    if is_out_of_memory(error):
        return EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"{stream} ran out of memory: close other programs, or allow the model less memory or a shorter context.",
        )
    # Formatted here: a stored log record would keep the frames alive.
    _log.error("work on %s failed\n%s", stream, "".join(traceback.format_exception(error)))
    text = (str(error).strip().splitlines() or [""])[0]
    return EngineError(
        ErrorCode.INTERNAL,
        f"Work on {stream} failed ({type(error).__name__}: {text}): try again, and report it if that does not help.",
    )


def fresh(error: EngineError) -> EngineError:
    """A copy of the error to raise: a shared instance would keep the frames of its last raise alive."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def closed_error(stream: str) -> EngineError:
    """The error of work that a closing device did not run."""
    return EngineError(ErrorCode.DEVICE_UNAVAILABLE, f"{stream} was closed: load the model again.")
