#!/usr/bin/env python3
"""Sets up a fresh checkout and opens the window, or runs the tests; safe to repeat.

    python3 installers/start.py                      set up Switchyard in .venv, get the starter model, open the window
    python3 installers/start.py test                 also set up the test tools, and run all checks and tests
    python3 installers/start.py test tests/unit -x   the same, but only pytest, with these arguments
    python3 installers/start.py gpu                  measure a graphics card for ten minutes, and write docs/cards/

Needs only Python 3.11.  Everything goes into .venv in the checkout, except for the starter model, which
goes into your Switchyard data folder.  (This file must parse on Python 3.8, to report an old version.)
"""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from pathlib import Path

OLDEST_PYTHON = (3, 11)
_GLIBC, _MACOS, _WINDOWS = "2.34", "14", "10"
"""The oldest systems for which all that is installed is built."""
CHECKOUT = Path(__file__).resolve().parent.parent
USAGE = "Usage: python3 installers/start.py [test [arguments for pytest] | gpu [arguments for switchyard bench card]]"


def main(arguments: list[str]) -> int:
    """Runs the command; returns 0, the exit code of the window or the tests, or 2 if set-up failed."""
    if sys.version_info[:2] < OLDEST_PYTHON:
        print(too_old(sys.version_info[:3], sys.executable), file=sys.stderr)
        return 2
    unsuitable = why_unsuitable()
    if unsuitable:
        print(unsuitable, file=sys.stderr)
        return 2
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0
    commands = {"test": test, "gpu": gpu}
    if arguments and arguments[0] not in commands:
        print(f"start.py does not know '{arguments[0]}'.  {USAGE}", file=sys.stderr)
        return 2

    import steps_console  # only once the version is known to be new enough

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; it must be interruptible too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return commands[arguments[0]](arguments[1:]) if arguments else start()
    except steps_console.SetupError as stopped:
        print(f"\n{stopped}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.  Run the same command again to continue.", file=sys.stderr)
        return 130


def too_old(version: tuple[int, ...], executable: str) -> str:
    return (
        "Switchyard needs Python {} or newer, and this is Python {} ({}): install a newer one "
        "(python.org, Homebrew, or your distribution's packages) and start this script with it."
    ).format(".".join(map(str, OLDEST_PYTHON)), ".".join(map(str, version)), executable)


def why_unsuitable() -> str:
    """Why nothing would run on this system, in a sentence; empty if it would."""
    if sys.maxsize < 2**32:
        return "Switchyard needs a 64-bit Python, and {} is a 32-bit one: install the other.".format(sys.executable)
    system = platform.system()
    if system == "Linux":
        library, version = platform.libc_ver()
        if library != "glibc":
            return "Switchyard needs a Linux with glibc {} or newer; this one has another C library.".format(_GLIBC)
        if _is_older(version, _GLIBC):
            return "Switchyard needs glibc {} or newer, and this system has {}: use a newer version of it.".format(
                _GLIBC, version
            )
    if system == "Darwin":
        if platform.machine() != "arm64":
            return "Switchyard needs a Mac with an Apple processor (M1 or newer), and a Python that is made for it."
        if _is_older(platform.mac_ver()[0], _MACOS):
            return "Switchyard needs macOS {} or newer, and this Mac has {}: update it first.".format(
                _MACOS, platform.mac_ver()[0]
            )
    if system == "Windows" and _is_older(platform.version(), _WINDOWS):
        return "Switchyard needs Windows {} or newer: PyTorch runs on no older one.".format(_WINDOWS)
    return ""


def _is_older(version: str, wanted: str) -> bool:
    numbers = [[int(part) for part in text.split(".") if part.isdigit()] for text in (version, wanted)]
    return bool(numbers[0]) and numbers[0] < numbers[1]


def start() -> int:
    """Sets up, then opens the window; without a display, chats in the terminal."""
    import steps_environment
    import steps_machine

    has_display = steps_machine.has_display()
    environment = steps_environment.prepare(CHECKOUT)
    if has_display:
        steps_machine.need_libraries(steps_machine.WINDOW_LIBRARIES, "The window", environment.log)
    environment.get_starter_model()
    if has_display:
        print("Opening the window.", flush=True)
        return subprocess.call([environment.python, "-m", "app"], cwd=CHECKOUT, env=environment.variables)
    print("No display (neither DISPLAY nor WAYLAND_DISPLAY is set); chatting in the terminal.", flush=True)
    return subprocess.call([environment.python, "-m", "engine.cli", "chat"], cwd=CHECKOUT, env=environment.variables)


def test(pytest_arguments: list[str]) -> int:
    """Sets up the test tools, then runs the checks and pytest (only pytest if it has arguments)."""
    import steps_environment
    import steps_machine

    environment = steps_environment.prepare(CHECKOUT)
    environment.install_test_tools()
    steps_machine.need_libraries(steps_machine.WINDOW_LIBRARIES, "The window's tests", environment.log)
    steps_machine.want_programs(steps_machine.E2E_PROGRAMS, "the end-to-end tests of the real window", environment.log)
    environment.get_starter_model_for_tests()

    checks = [] if pytest_arguments else [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]
    failed = []
    for check in checks:
        print("\n$ {}".format(" ".join(check)), flush=True)
        if subprocess.call([environment.python, "-m", *check], cwd=CHECKOUT, env=environment.variables) != 0:
            failed.append(check[0])
    # The import contracts are tests (tests/unit/test_import_contracts.py).
    print("\n$ pytest", flush=True)
    if failed:
        print(
            f"(This run will fail whatever the tests say: {' and '.join(failed)} reported errors above.)",
            flush=True,
        )
    # Three processes: a sixth of their time they wait, for servers, timers and processes of their own. Each gets whole
    # files as long as possible, for fixtures that a file's tests share. A selection of tests runs one by one, to be
    # readable.
    arguments = pytest_arguments or ["-n", "3", "--dist", "worksteal", "--slowest-files", "10"]
    tests = subprocess.call([environment.python, "-m", "pytest", *arguments], cwd=CHECKOUT, env=environment.variables)
    return tests or int(bool(failed))


def gpu(arguments: list[str]) -> int:
    """Sets up the test tools, then measures the card; what it writes is of use to everybody with such a card."""
    import steps_environment

    environment = steps_environment.prepare(CHECKOUT)
    environment.install_test_tools()
    command = [environment.python, "-m", "engine.cli", "bench", "card", *arguments]
    return subprocess.call(command, cwd=CHECKOUT, env=environment.variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
