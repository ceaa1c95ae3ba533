"""What a bench prepares of a model is not left behind: it lies in a folder of its own that goes with the bench."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from engine.checkpoint.library import converted_dir
from engine.checkpoint.staging import staging_folder
from engine.common.files import disk_errors_explained
from engine.common.paths import PREPARED_VARIABLE


@contextlib.contextmanager
def prepared_apart() -> Iterator[Path]:
    """A folder, empty at first, where this process and those that it starts find and keep prepared weights meanwhile.

    It is on the same disk as ever, and removed at the end, also after Ctrl+C; one that a killed bench left is removed
    by the next one.

    Raises:
        EngineError: the data folder cannot be written to.
    """
    before = os.environ.get(PREPARED_VARIABLE)
    usual = converted_dir()
    with contextlib.ExitStack() as held:
        with disk_errors_explained(usual):
            folder = held.enter_context(staging_folder(usual))
        os.environ[PREPARED_VARIABLE] = str(folder)
        try:
            yield folder
        finally:
            if before is None:
                del os.environ[PREPARED_VARIABLE]
            else:
                os.environ[PREPARED_VARIABLE] = before
