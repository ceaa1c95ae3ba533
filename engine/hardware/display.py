"""Whether a window can be shown here."""

from __future__ import annotations

import os
import sys

DISPLAY_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM")
"""On Linux one of them is set where there is an X server, a Wayland compositor or another platform of Qt's."""


def has_display() -> bool:
    """Outside Linux always; there, if one of `DISPLAY_VARIABLES` says so."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in DISPLAY_VARIABLES)
