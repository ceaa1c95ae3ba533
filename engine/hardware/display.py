"""Whether a window can be shown here."""

from __future__ import annotations

import os
import sys

DISPLAY_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
"""On Linux one of these is set if there is an X server, a Wayland compositor or another Qt platform."""


def has_display() -> bool:
    """Whether there is a display: on Linux, if one of `DISPLAY_VARIABLES` is set; elsewhere always."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in DISPLAY_VARIABLES)
