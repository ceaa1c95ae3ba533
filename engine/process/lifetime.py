"""How the worker lives and dies: never longer than its window, never instead of it, and not without a log."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import stat
import sys
from pathlib import Path

from engine.process.logs import log_to_file

STDERR_BYTES = 4 * 2**20
_PR_SET_PDEATHSIG = 1


def set_up_process() -> None:
    """Do all of the below; nothing of it can fail the worker."""
    # Ctrl-C in the terminal that started the window reaches us too, but the window decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    _be_killed_first()
    faulthandler.enable()
    logging.captureWarnings(True)
    log_to_file("engine.log", also_stderr=True)


def trim_stderr() -> None:
    """Empty the file that stderr goes to, if it is one and has grown: a library may warn for weeks."""
    try:
        status = os.fstat(2)
        if stat.S_ISREG(status.st_mode) and status.st_size > STDERR_BYTES:
            os.ftruncate(2, 0)
    except OSError:
        return


def end_process(code: int) -> None:
    """End at once, without the teardown of libraries that may still compute."""
    logging.shutdown()
    os._exit(code)


def _die_with_parent() -> None:
    """Be killed if the window is, even while a computation keeps us from seeing the end of its pipe (Linux)."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        except (OSError, AttributeError):
            return


def _be_killed_first() -> None:
    """Should memory run out, the kernel is to take the engine and leave the window (Linux)."""
    try:
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    except OSError:
        return
