"""The standard streams of a program that has none: pythonw on Windows, which opens no console."""

from __future__ import annotations

import os
import sys


def fill_streams() -> None:
    """Gives this process the streams that it was started without: nothing is read, and what is written goes nowhere.

    Libraries write to `sys.stderr` without looking whether there is one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Open as long as the process is, like the streams that it stands for.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def has_console() -> bool:
    """Whether somebody may read what is written to stderr."""
    return sys.stderr is not None and getattr(sys.stderr, "name", "") != os.devnull


def tell(sentence: str) -> None:
    """Says a sentence on stderr, or in a dialog where nobody would read it there."""
    if not has_console() and sys.platform == "win32":
        import ctypes

        ctypes.windll.user32.MessageBoxW(None, sentence, "Switchyard", 0x10)
    elif sys.stderr is not None:
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
