"""Stops a job in another process: through a file beside the journal, for which the job polls."""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_S = 0.5


def stop_path(journal: Path) -> Path:
    """The file whose existence requests the stop."""
    return journal.with_name(journal.name + ".stop")


def ask_to_stop(journal: Path) -> None:
    """Asks the process running this journal's job to stop; it does within a second, and all answers are kept."""
    stop_path(journal).touch(0o600)


class StopRequest:
    """The stop request of the job that this process runs; earlier requests are deleted."""

    def __init__(self, journal: Path) -> None:
        self._path = stop_path(journal)
        self._path.unlink(missing_ok=True)
        self._looked_s = time.monotonic()
        self._is_made = False

    def is_made(self) -> bool:
        """Whether a stop was requested; cheap enough to call for every layer."""
        now = time.monotonic()
        if not self._is_made and now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._is_made = self._path.exists()
        return self._is_made

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
