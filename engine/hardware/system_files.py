"""What the operating system says: small kernel files (`/sys`, `/proc`), the output of programs, calls with a timeout.

Anything may be missing or hang: a file that cannot be read is None, a call that hangs is abandoned.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar


def text_of(path: Path) -> str | None:
    """The file's stripped text; None if it cannot be read or is empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except (OSError, ValueError):
        return None


def number_of(path: Path) -> int | None:
    """The integer in the file."""
    try:
        return int(text_of(path) or "", 0)
    except ValueError:
        return None


def cpus_of(text: str | None) -> frozenset[int]:
    """CPU ids of a list in the kernel's format: `0-3,8`."""
    numbers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def output_of(*command: str, timeout_s: float = 5.0) -> str | None:
    """A program's output; None if it fails, hangs or is missing."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # none flashes up beside the window
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


T = TypeVar("T")


class BoundedCalls:
    """Runs calls on its own threads, one at a time.

    A hanging call cannot be ended, only abandoned: its thread ends when the driver returns. Until then all further
    calls fail at once, so a driver that hangs for an hour blocks one thread and not thousands.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._left: threading.Thread | None = None

    @property
    def hangs(self) -> bool:
        """Whether an abandoned call is still running."""
        return self._left is not None and self._left.is_alive()

    def __call__(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function` returns or raises.

        Raises:
            TimeoutError: it took longer than `timeout_s`, or an earlier call still hangs.
        """
        with self._turn:
            if self.hangs:
                raise TimeoutError(f"{self._name}: an earlier call still hangs")
            outcome: _Outcome[T] = _Outcome()
            thread = threading.Thread(target=outcome.run, args=(function,), name=self._name, daemon=True)
            thread.start()
            thread.join(timeout_s)
            self._left = thread if thread.is_alive() else None
            return outcome.result(self._name)


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self._values: list[T] = []
        self._error: BaseException | None = None

    def run(self, function: Callable[[], T]) -> None:
        try:
            self._values.append(function())
        except BaseException as error:  # re-raised in the calling thread
            self._error = error

    def result(self, name: str) -> T:
        if self._error is not None:
            raise self._error
        if not self._values:
            raise TimeoutError(f"{name}: no answer in time")
        return self._values[0]
