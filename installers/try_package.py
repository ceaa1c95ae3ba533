#!/usr/bin/env python3
"""Installs a package as a user would, starts what it installed, and removes it: `try_package.py DIST [SYSTEM...]`.

DIST is a folder with packages; those of this machine's kind are tried. What a started program says on one line is a
sentence; each step prints one, and the first that fails ends with 1.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WINDOW_S = 60.0


class StepError(Exception):
    """A step went wrong; the message says which and how."""


def main(arguments: list[str]) -> int:
    """0 if all packages of this machine's kind work, 1 if one does not, 2 if there is none."""
    dist = Path(arguments[0] if arguments else "dist").resolve()
    tried = 0
    try:
        for pattern, attempt in (("*.run", try_run), ("*.deb", try_deb), ("*-Setup.exe", try_setup)):
            for package in sorted(dist.glob(pattern)):
                if fits(package):
                    attempt(package)
                    tried += 1
    except StepError as failure:
        print(f"FAILED: {failure}")
        return 1
    if not tried:
        print(f"{dist} has no package for this machine.")
    return 0 if tried else 2


def fits(package: Path) -> bool:
    """Whether a package is for this machine."""
    if package.suffix == ".exe":
        return platform.system() == "Windows"
    names = {"x86_64": ("x86_64", "amd64"), "aarch64": ("aarch64", "arm64")}.get(platform.machine(), ())
    if platform.system() != "Linux" or not any(package.stem.endswith(name) for name in names):
        return False
    return package.suffix == ".run" or (shutil.which("apt-get") is not None and os.geteuid() == 0)


def try_run(package: Path) -> None:
    """In a home of its own, whose path has a space and an umlaut."""
    with tempfile.TemporaryDirectory(prefix="Übung mit Leerzeichen ") as name:
        home = Path(name)
        variables = {"HOME": str(home), "XDG_DATA_HOME": "", "SWITCHYARD_HOME": str(home / "data")}
        step("install", ["sh", package], variables)
        command = home / ".local" / "bin" / "switchyard"
        use([command], variables)
        step("install again", ["sh", package], variables)
        use([command], variables)
        step("remove", [home / ".local" / "bin" / "switchyard-uninstall", "--models", "--chats"], variables)
        left = [path for path in home.rglob("*") if path.is_file() or path.is_symlink()]
        if left:
            raise StepError(f"{package.name} leaves {left[0]}")
    print(f"{package.name}: installed, used, installed again and removed")


def try_deb(package: Path) -> None:
    """On this system itself."""
    with tempfile.TemporaryDirectory(prefix="switchyard-try-") as name:
        variables = {"HOME": name, "SWITCHYARD_HOME": str(Path(name) / "data"), "DEBIAN_FRONTEND": "noninteractive"}
        step("install", ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package], variables)
        use([Path("/usr/bin/switchyard")], variables)
        step("upgrade", ["apt-get", "install", "-y", "-qq", "--reinstall", package], variables)
        use([Path("/usr/bin/switchyard")], variables)
        step("remove", ["apt-get", "purge", "-y", "-qq", "switchyard"], variables)
    for left in (
        Path("/opt/switchyard"),
        Path("/usr/bin/switchyard"),
        Path("/usr/share/applications/switchyard.desktop"),
    ):
        if left.exists() or left.is_symlink():
            raise StepError(f"{package.name} leaves {left}")
    print(f"{package.name}: installed, used, upgraded and removed")


def try_setup(package: Path) -> None:
    """In silence, for this user."""
    program = Path(os.environ["LOCALAPPDATA"]) / "Programs" / "Switchyard"
    with tempfile.TemporaryDirectory(prefix="switchyard-try-") as name:
        variables = {"SWITCHYARD_HOME": str(Path(name) / "data")}
        for _ in range(2):
            step("install", [package, "/S"], variables)
            use([program / "switchyard-cli.exe"], variables)
        # The copy that removes the original would be waited for by nobody.
        step("remove", [program / "uninstall.exe", "/S", "/MODELS", "/CHATS", f"_?={program}"], variables)
        if (program / "bundle.json").exists():
            raise StepError(f"{package.name} leaves {program}")
        shutil.rmtree(program, ignore_errors=True)
    print(f"{package.name}: installed, used, installed again and removed")


def use(command: list[Path], variables: dict[str, str]) -> None:
    """Commands that need no engine's part, and the window."""
    said = step("--version", [*command, "--version"], variables)
    if not said.startswith("switchyard "):
        raise StepError(f"--version says {said!r}")
    document = json.loads(step("models", [*command, "models", "list", "--json"], variables))
    if not isinstance(document, dict):
        raise StepError("models list --json says no document")
    if platform.system() == "Linux" and shutil.which("Xvfb") and shutil.which("xdotool"):
        with display() as variables_of_display:
            _open_window(command, {**variables, **variables_of_display})


def _open_window(command: list[Path], variables: dict[str, str]) -> None:
    begun = time.monotonic()
    window = subprocess.Popen(command, env={**os.environ, **variables})
    try:
        while time.monotonic() < begun + _WINDOW_S and window.poll() is None:
            found = subprocess.run(
                ["xdotool", "search", "--onlyvisible", "--name", "Switchyard"],
                env={**os.environ, **variables},
                capture_output=True,
                check=False,
            )
            if found.returncode == 0:
                print(f"the window was open after {time.monotonic() - begun:.1f} s")
                return
            time.sleep(0.05)
        raise StepError("the window did not open")
    finally:
        window.terminate()
        window.wait(30)


@contextmanager
def display() -> Iterator[dict[str, str]]:
    """A display without a screen."""
    reading, writing = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writing), "-screen", "0", "1280x800x24", "-nolisten", "tcp"],
        pass_fds=[writing],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as said:
            number = said.readline().strip()
        yield {"DISPLAY": f":{number}", "QT_QPA_PLATFORM": "xcb"}
    finally:
        server.terminate()
        server.wait(10)


def step(what: str, command: list[Path | str], variables: dict[str, str]) -> str:
    """Runs a program to its end."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=1800,
        check=False,
    )
    if done.returncode != 0:
        raise StepError(f"{what}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
