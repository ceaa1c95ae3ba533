"""Small kernel files (`/sys`, `/proc`) and the output of programs; None if unavailable."""

from __future__ import annotations

import subprocess
from pathlib import Path


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
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
