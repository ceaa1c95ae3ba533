"""The process's lifetime: its environment, its log, and its end.

Libraries read their environment variables on import: set them before importing torch or transformers. The log is small,
rotating, and without user text. A worker ends with its window, and is killed before it when memory runs out.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.common.files import PrivateLog, private_folder
from engine.common.paths import log_dir
from engine.common.plain_text import plain

_SPINS = "1000"
"""Looks for more work that a thread of torch takes before it sleeps: GNU's library has this number where there are more
threads than cores. Otherwise it looks for milliseconds, on a core that the native kernels want meanwhile."""


def quiet_libraries() -> None:
    """No network, no telemetry, no developer warnings, no forked tokenizer threads, no busy idle threads."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)


LOG_BYTES = 2**20
SELDOM_S = 60.0
_MOST_SEEN = 1000


class _Plain(logging.Formatter):
    """Strips terminal escapes from entries: file names and model output may contain them."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


class Seldom(logging.Filter):
    """Lets a warning or an error through once a minute, with how often it came meanwhile: strangers may cause many."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`; decides once for all handlers."""
        if "is_let_through" not in record.__dict__:
            record.__dict__["is_let_through"] = self._lets_through(record)
        return bool(record.__dict__["is_let_through"])

    def _lets_through(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now_s = self._now_s()
        entry = (record.pathname, record.lineno, str(record.args))
        since_s, more = self._seen.get(entry, (now_s - SELDOM_S, 0))
        if now_s - since_s < SELDOM_S:
            self._seen[entry] = since_s, more + 1
            return False
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[entry] = now_s, 0
        if more:
            record.msg, record.args = f"{record.getMessage()} (and {more:,} times since it was last written)", None
        return True


def log_to_file(name: str, *, also_stderr: bool) -> Callable[[], None]:
    """Sends this process's log to `name` in the log folder; if that is not writable, there is no log.

    Returns:
        A function that stops logging and closes the file.
    """
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    seldom = Seldom()
    handlers: list[logging.Handler] = [logging.StreamHandler()] if also_stderr else []
    try:
        private_folder(log_dir())
        # Opened on the first entry: most commands never log.
        handlers.append(PrivateLog(log_dir() / name, max_bytes=LOG_BYTES, older=2))
    except OSError:
        handlers.append(logging.NullHandler())
    for handler in handlers:
        handler.addFilter(seldom)
        handler.setFormatter(_Plain("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)

    def end() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()

    return end


STDERR_BYTES = 4 * 2**20
_PR_SET_PDEATHSIG = 1


def set_up_process(*, also_stderr: bool = True) -> None:
    """Does all of the below; a failure of any of it does not stop the worker."""
    # Ctrl-C in the terminal that started the window reaches us too, but the window decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    _be_killed_first()
    faulthandler.enable()
    logging.captureWarnings(True)
    log_to_file("engine.log", also_stderr=also_stderr)


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
