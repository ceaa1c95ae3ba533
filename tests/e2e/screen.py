"""A private X server with a private accessibility bus: a screen of our own, with a keyboard and a mouse."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("Xvfb", "xdotool", "dbus-daemon")
SIZE = "1400x900"

SHUTTER = """
import sys
from PySide6.QtGui import QGuiApplication
app = QGuiApplication([])
width, height = map(int, sys.argv[2:4])
for line in sys.stdin:
    app.primaryScreen().grabWindow(0, 0, 0, width, height).save(f"{sys.argv[1]}/{line.strip()}.png")
    print(line.strip(), flush=True)
"""
"""A process that keeps a picture of the screen for every line that it is given: only a client of the X server can."""

_BUS_CONFIG = """<busconfig>
  <type>session</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default"><allow send_destination="*"/><allow eavesdrop="true"/><allow own="*"/></policy>
</busconfig>
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Screen:
    """The display and the bus; `press`, `type` and `click` are real X events."""

    def __init__(self, display: str, bus_address: str) -> None:
        self.bus_address = bus_address
        self.variables = {
            **os.environ,
            "DISPLAY": display,
            "QT_QPA_PLATFORM": "xcb",
            "AT_SPI_BUS_ADDRESS": bus_address,
            "QT_LINUX_ACCESSIBILITY_ALWAYS_ON": "1",
        }
        self.variables.pop("WAYLAND_DISPLAY", None)

    def press(self, keys: str) -> None:
        """Presses a key or a chord, such as `Escape` or `ctrl+a`."""
        self._xdotool("key", "--clearmodifiers", keys)

    def type(self, text: str) -> None:
        self._xdotool("type", "--clearmodifiers", "--delay", "4", text)

    def click(self, x: int, y: int) -> None:
        self._xdotool("mousemove", str(x), str(y), "click", "1")  # --sync waits for ever where the pointer is there

    def wheel(self, x: int, y: int, *, down: bool) -> None:
        """Turns the wheel by one notch there."""
        self._xdotool("mousemove", str(x), str(y), "click", "5" if down else "4")

    def move(self, x: int, y: int) -> None:
        self._xdotool("mousemove", str(x), str(y))

    def keep_picture(self, path: Path, width: int, height: int) -> None:
        """Writes the upper left part of the screen as a PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)  # else nothing is kept, and nothing said
        command = [sys.executable, "-c", SHUTTER, str(path.parent), str(width), str(height)]
        subprocess.run(
            command, env=self.variables, input=path.stem.encode(), check=True, timeout=60, capture_output=True
        )

    def focus_window_of(self, pid: int) -> None:
        """Gives the keyboard to the process's window: there is no window manager here that would."""
        self._xdotool("search", "--sync", "--onlyvisible", "--pid", str(pid), "--name", "Switchyard", "windowfocus")

    def _xdotool(self, *arguments: str) -> None:
        subprocess.run(["xdotool", *arguments], env=self.variables, check=True, timeout=60, capture_output=True)


@contextlib.contextmanager
def private_screen(folder: Path) -> Iterator[Screen]:
    """A screen for as long as the context lasts; sockets and settings lie in `folder`, whose path must be short."""
    with contextlib.ExitStack() as stack:
        yield Screen(stack.enter_context(_x_server()), stack.enter_context(_bus(folder)))


@contextlib.contextmanager
def _x_server() -> Iterator[str]:
    read_end, write_end = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write_end), "-screen", "0", f"{SIZE}x24", "-nolisten", "tcp", "-noreset"],
        pass_fds=(write_end,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    with _ended(server), open(read_end, encoding="ascii") as display_number:
        # The server picks a free number and writes it when it is ready; an empty line means that it died.
        number = display_number.readline().strip()
        assert number, "Xvfb did not start"
        yield f":{number}"


@contextlib.contextmanager
def _bus(folder: Path) -> Iterator[str]:
    socket, config = folder / "a11y", folder / "a11y.conf"
    config.write_text(_BUS_CONFIG.format(socket=socket), encoding="utf-8")
    daemon = subprocess.Popen(
        ["dbus-daemon", f"--config-file={config}", "--nofork", "--nopidfile", "--print-address"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with _ended(daemon):
        assert daemon.stdout is not None
        with daemon.stdout as addresses:
            address = addresses.readline().strip()
            assert address, "dbus-daemon did not start"
            yield address


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)
