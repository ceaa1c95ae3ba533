"""Asks a window to close, as a window manager does when its cross is clicked; there is none on the private screen."""

import ctypes
import subprocess

from tests.e2e.screen import Screen

_CLIENT_MESSAGE = 33


class _ClientMessage(ctypes.Structure):
    """XClientMessageEvent, padded to the size of an XEvent."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("serial", ctypes.c_ulong),
        ("send_event", ctypes.c_int),
        ("display", ctypes.c_void_p),
        ("window", ctypes.c_ulong),
        ("message_type", ctypes.c_ulong),
        ("format", ctypes.c_int),
        ("data", ctypes.c_long * 5),
        ("padding", ctypes.c_long * 24),
    )


def ask_to_close(screen: Screen, pid: int) -> None:
    """Sends WM_DELETE_WINDOW to the main window of that process."""
    found = subprocess.run(
        ["xdotool", "search", "--onlyvisible", "--pid", str(pid), "--name", "Switchyard"],
        env=screen.variables,
        check=True,
        capture_output=True,
        text=True,
    )
    window = int(found.stdout.split()[0])
    xlib = ctypes.CDLL("libX11.so.6")
    xlib.XOpenDisplay.restype = ctypes.c_void_p
    xlib.XInternAtom.restype = ctypes.c_ulong
    display = ctypes.c_void_p(xlib.XOpenDisplay(screen.variables["DISPLAY"].encode()))
    assert display, "the private screen does not answer"
    message = _ClientMessage(
        type=_CLIENT_MESSAGE,
        window=window,
        message_type=xlib.XInternAtom(display, b"WM_PROTOCOLS", 0),
        format=32,
    )
    message.data[0] = xlib.XInternAtom(display, b"WM_DELETE_WINDOW", 0)
    xlib.XSendEvent(display, ctypes.c_ulong(window), 0, ctypes.c_long(0), ctypes.byref(message))
    xlib.XCloseDisplay(display)
