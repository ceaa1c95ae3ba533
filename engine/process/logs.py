"""Log files in the per-user folder: small, rotating, and without user text."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.common.files import PrivateLog, private_folder
from engine.common.paths import log_dir
from engine.common.plain_text import plain

LOG_BYTES = 2**20


class _Plain(logging.Formatter):
    """Strips terminal escapes from entries: file names and model output may contain them."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def log_to_file(name: str, *, also_stderr: bool) -> Callable[[], None]:
    """Sends this process's log to `name` in the log folder; if that is not writable, there is no log.

    Returns:
        A function that stops logging and closes the file.
    """
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [logging.StreamHandler()] if also_stderr else []
    try:
        private_folder(log_dir())
        # Opened on the first entry: most commands never log.
        handlers.append(PrivateLog(log_dir() / name, max_bytes=LOG_BYTES, older=2))
    except OSError:
        handlers.append(logging.NullHandler())
    for handler in handlers:
        handler.setFormatter(_Plain("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)

    def end() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()

    return end
