"""Read speed of the models' disk: a scratch file, bypassing the page cache, with several reads in flight."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.common.files import new_folder
from engine.experts.direct_file import DirectFile
from engine.hardware.measured import DiskRead
from engine.measure.disk_rates import read_rate, write_rate
from engine.measure.run import NotMeasuredError, Run

_PREFIX = ".switchyard-measuring-"
_STALE_S = 3600.0
_ROOM = 4
"""Free space required, in sizes of the file: measuring must not fill the disk."""


@dataclass(frozen=True)
class DiskReads:
    """Every queue depth with every read size, up to the largest of `disk_rates.read_rate`."""

    file_bytes: int
    depths: tuple[int, ...]
    sizes: tuple[int, ...]
    repeats: int
    estimated_s: float
    name: str = "disk"

    def __call__(self, run: Run) -> None:
        """See `Measurement`."""
        with scratch_file(run.folder) as path:
            free = shutil.disk_usage(path.parent).free
            if free < _ROOM * self.file_bytes:
                raise NotMeasuredError(f"the disk of {run.folder} is nearly full")
            # On a very slow disk, write less of the file.
            write_rate(path, self.file_bytes, run.check)
            file = DirectFile(path)
            is_direct = file.is_direct
            file.close()
            # Large reads come first: experts are read that way.
            for size, depth in sorted(itertools.product(self.sizes, self.depths), key=lambda each: -each[0]):
                rates = [read_rate(path, depth, size, run.check)]
                while len(rates) < self.repeats and not run.is_late:
                    rates.append(read_rate(path, depth, size, run.check))
                run.found(DiskRead(depth, size, is_direct, statistics.median(rates)))


@contextmanager
def scratch_file(folder: Path) -> Iterator[Path]:
    """An empty file in the folder, which is created if missing; leftovers of a killed process are removed.

    Raises:
        OSError: the disk failed.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    new_folder(folder)
    for old in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_S:
                old.unlink()
    handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
