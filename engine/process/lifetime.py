"""The worker's lifetime: it ends with its window, is killed before it when memory runs out, and keeps a log."""

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
    """Does all of the below; a failure of any of it does not stop the worker."""
    # Ctrl-C in the terminal that started the window reaches us too, but the window decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    _be_killed_first()
    faulthandler.enable()
    logging.captureWarnings(True)
    log_to_file("engine.log", also_stderr=True)


def trim_stderr() -> None:
    """Empty the file that stderr goes to, if it is one and has grown: libraries may write warnings for weeks."""
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
    """Die with the window, even while a computation keeps us from noticing its closed pipe (Linux)."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        except (OSError, AttributeError):
            return


def _be_killed_first() -> None:
    """If memory runs out, the kernel should kill the engine, not the window (Linux)."""
    try:
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    except OSError:
        return
