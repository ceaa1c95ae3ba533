"""Small files that the kernel writes (`/sys`, `/proc`), and what programs print: None where there is nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path


def text_of(path: Path) -> str | None:
    """What the file says, without the space around it; None if it cannot be read or says nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except (OSError, ValueError):
        return None


def number_of(path: Path) -> int | None:
    """The whole number in the file."""
    try:
        return int(text_of(path) or "", 0)
    except ValueError:
        return None


def cpus_of(text: str | None) -> frozenset[int]:
    """CPU numbers of a list as the kernel writes it: `0-3,8`."""
    numbers: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def output_of(*command: str, timeout_s: float = 5.0) -> str | None:
    """What a program prints, or None if it fails, hangs or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
