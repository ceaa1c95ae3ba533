"""Starts the window: `python -m app`.  What keeps it from starting is said in one sentence."""

from __future__ import annotations

import ctypes
import os
import sys

from engine.common.plain_text import fill_streams, tell

CURSORS = "libxcb-cursor.so.0"
"""Without it Qt ends the process on X11, and many systems that have the rest of what Qt needs lack it."""


def main(argv: list[str] | None = None) -> int:
    """The exit code; 2 if a library is missing."""
    fill_streams()
    try:
        from app.main import main as open_window

        if _shows_by_x11():
            ctypes.CDLL(CURSORS)
    except (ImportError, OSError) as error:
        missing = getattr(error, "name", None) or str(error).partition(": ")[0]
        tell(f"Switchyard's window cannot start without {missing}: install that, or Switchyard again.")
        return 2
    return open_window(argv)


def _shows_by_x11() -> bool:
    if sys.platform != "linux" or os.environ.get("WAYLAND_DISPLAY"):
        return False
    return os.environ.get("QT_QPA_PLATFORM", "xcb").startswith("xcb")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would take the window's objects apart while threads in the background still know them: at times it crashed.
    os._exit(code)
