"""Turns any exception into one sentence for the user and a log entry free of user text."""

from __future__ import annotations

import errno
import logging
import traceback
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.installed import give_up_own_part

_log = logging.getLogger(__name__)

# What torch and the operating system say when an allocation fails; the types differ by device and version.
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def as_engine_error(error: BaseException, doing: str) -> EngineError:
    """The error that hit `doing` (such as "loading the model"), as a message for the user."""
    if isinstance(error, EngineError):
        return error
    if _is_out_of_memory(error):
        return EngineError(
            ErrorCode.NOT_ENOUGH_MEMORY,
            f"Out of memory while {doing}: close other programs, or choose a shorter context, "
            "a smaller precision or a smaller model.",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EngineError(ErrorCode.DISK_FULL, f"The disk became full while {doing}: free some space and try again.")
    if isinstance(error, ImportError | OSError) and (damage := give_up_own_part()) is not None:
        return damage
    if isinstance(error, ImportError):
        return EngineError(
            ErrorCode.INTERNAL,
            f"Part of the installation is missing or broken ({error.name or type(error).__name__}): "
            "reinstall Switchyard; `switchyard doctor` says more.",
        )
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return EngineError(
        ErrorCode.INTERNAL,
        f"Internal error while {doing} ({type(error).__name__}{where}); the log has the details for a bug report.",
    )


def log_failure(error: BaseException, doing: str) -> None:
    """Logs where it failed, without the exception's text, which can quote a prompt or an answer."""
    if isinstance(error, EngineError):
        _log.warning("Failed while %s: %s", doing, error.code)
        return
    stack = "".join(traceback.format_tb(error.__traceback__))
    _log.error("Failed while %s: %s\n%s", doing, type(error).__name__, stack)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MEMORY_WORDS)
