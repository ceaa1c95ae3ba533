"""`doctor`'s checks for showing a window."""

from __future__ import annotations

import ctypes
import os
import sys

from engine.hardware.surroundings import DISPLAY_VARIABLES, has_display
from engine.verbs.doctor_checks import Finding, Status

# System libraries that Qt needs (`readelf -d` of libQt6Gui, libQt6XcbQpa, libqxcb), and Debian's packages.
_QT_SYSTEM_LIBRARIES = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libX11-xcb.so.1": "libx11-xcb1",
    "libdbus-1.so.3": "libdbus-1-3",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-util.so.1": "libxcb-util1",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
}


def display_findings() -> list[Finding]:
    """Whether there is a display, and on Linux whether Qt's system libraries are installed."""
    if sys.platform != "linux":
        return [Finding("display", Status.OK, "the desktop's own")]
    shown = has_display()
    findings = [_display_finding(shown)]
    missing = missing_qt_libraries()
    if missing:
        packages = " ".join(dict.fromkeys(_QT_SYSTEM_LIBRARIES[library] for library in missing))
        findings.append(
            Finding(
                "window libraries",
                # Without a display there is no window that needs them.
                Status.PROBLEM if shown else Status.ADVICE,
                f"Qt needs {', '.join(missing)}, which cannot be loaded.",
                f"On Debian or Ubuntu: `sudo apt-get install {packages}`.",
            )
        )
    else:
        findings.append(Finding("window libraries", Status.OK, "all system libraries for Qt are there"))
    return findings


def missing_qt_libraries() -> list[str]:
    """System libraries that Qt needs for a window but that cannot be loaded."""
    missing = []
    for library in _QT_SYSTEM_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(library)
    return missing


def _display_finding(shown: bool) -> Finding:
    if shown:
        names = [name for name in DISPLAY_VARIABLES if os.environ.get(name)]
        return Finding("display", Status.OK, ", ".join(f"{name}={os.environ[name]}" for name in names))
    return Finding(
        "display",
        Status.ADVICE,
        "Neither DISPLAY nor WAYLAND_DISPLAY is set: no window can open here.",
        "Use `switchyard chat`, or log in to a desktop.",
    )
