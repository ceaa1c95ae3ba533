"""Log files in the per-user folder: small, rotating, and without anything that anybody typed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from logging.handlers import RotatingFileHandler

from engine.paths import log_dir

LOG_BYTES = 2**20


def log_to_file(name: str, *, also_stderr: bool) -> Callable[[], None]:
    """Send this process's log to `name` in the log folder; where that cannot be written, it is not kept.

    Returns:
        A function that ends this and closes the file.
    """
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [logging.StreamHandler()] if also_stderr else []
    try:
        log_dir().mkdir(parents=True, exist_ok=True)
        # Opened at its first entry: most commands never write one.
        handlers.append(
            RotatingFileHandler(log_dir() / name, maxBytes=LOG_BYTES, backupCount=2, encoding="utf-8", delay=True)
        )
    except OSError:
        handlers.append(logging.NullHandler())
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)

    def end() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()

    return end
