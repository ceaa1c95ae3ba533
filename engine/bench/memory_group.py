"""A memory control group for a child process: the fair way to page a file with limited RAM."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SLACK = 32 * 2**20
"""Slack: the kernel counts in batches, and a process keeps allocating a little.  It favours the limited process."""


class MemoryGroup:
    """A control group folder; version 1 and 2 have the same files under other names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v1 = (folder / "memory.limit_in_bytes").exists()

    def join(self) -> None:
        """Moves this process into the group.

        Raises:
            OSError: not permitted.
        """
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def limit_file_pages(self, nbytes: int) -> None:
        """Limits the group's file pages to `nbytes`, in addition to its current memory.

        Raises:
            OSError: not permitted.
        """
        statistics = (self.folder / "memory.stat").read_text(encoding="ascii").split()
        fields = {name: int(value) for name, value in zip(statistics[::2], statistics[1::2], strict=True)}
        usage, limit = ("usage_in_bytes", "limit_in_bytes") if self._is_v1 else ("current", "max")
        used = int((self.folder / f"memory.{usage}").read_text(encoding="ascii"))
        allocated = used - fields["inactive_file"] - fields["active_file"]
        (self.folder / f"memory.{limit}").write_text(str(allocated + nbytes + _SLACK), encoding="ascii")


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new group below our own, removed at the end, when its processes have ended.

    Raises:
        OSError: there are no control groups, or creating one is not permitted.
    """
    parent = _own_group()
    folder = Path(tempfile.mkdtemp(prefix="switchyard-bench-", dir=parent))
    try:
        if not any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            raise OSError("control groups here do not limit memory")
        yield MemoryGroup(folder)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _own_group() -> Path:
    if not sys.platform.startswith("linux"):
        raise OSError("only Linux has control groups")
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / group.strip("/")
        if not controllers and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / group.strip("/")
    raise OSError("no control group of this process limits memory")
