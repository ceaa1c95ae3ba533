"""One process asks another to stop its job: a file beside the journal, which whoever works on the job looks for."""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_S = 0.5


def stop_path(journal: Path) -> Path:
    """The file whose being there is the wish."""
    return journal.with_name(journal.name + ".stop")


def ask_to_stop(journal: Path) -> None:
    """Asks whoever works on the job of this journal; it stops within a second, everything kept."""
    stop_path(journal).touch(0o600)


class StopRequest:
    """For whoever works on a job, and alone may: wishes from before it began are forgotten."""

    def __init__(self, journal: Path) -> None:
        self._path = stop_path(journal)
        self._path.unlink(missing_ok=True)
        self._looked_s = time.monotonic()
        self._is_made = False

    def is_made(self) -> bool:
        """Whether somebody has asked; cheap enough to be called for every layer."""
        now = time.monotonic()
        if not self._is_made and now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._is_made = self._path.exists()
        return self._is_made

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
