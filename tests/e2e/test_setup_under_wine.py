"""Windows' package under Wine: everything but the window, for which Wine's Windows is not enough.

The package of `test_packages.py`, and one with a small program in its place, which breaks in more ways in less time.
"""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.broken import mounted
from tests.e2e.real_packages import CHECKOUT, NEWER, OF_PACKAGES, UNTESTED, Made, run

sys.path.insert(0, str(CHECKOUT / "installers"))

import try_package
from packages import windows
from packages.bundle import Bundle
from packages.kernels import PLATFORMS
from packages.project import read_project

WINE = Path("/usr/lib/wine/wine64")
pytestmark = [*OF_PACKAGES, pytest.mark.skipif(not WINE.exists(), reason="needs wine64")]


@pytest.fixture(scope="class")
def wine_s(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a Wine of its own, without a display."""
    # Also as the home, which Wine shows as the user's Desktop, Documents and more.
    names = ("WINEPREFIX", "HOME", "TMP", "TEMP", "TMPDIR")
    places = dict.fromkeys(names, str(tmp_path_factory.mktemp("wine")))
    return {"WINEDEBUG": "-all", "DISPLAY": "", **places}


@pytest.fixture(scope="class")
def wine(wine_s: dict[str, str]) -> Iterator[Callable[..., str]]:
    def wine(*command: str | Path, code: int = 0, **variables: str) -> str:
        return run(WINE, *command, code=code, **{**wine_s, **variables})

    wine("winecfg", "-v", "win10")
    yield wine
    wine("wineboot", "--kill")
    shutil.rmtree(wine_s["WINEPREFIX"], ignore_errors=True)


def _windows(shown: dict[str, str]) -> str:
    """Numbers of the windows of a display that are ours, a line each."""
    return run("sh", "-c", "xdotool search --onlyvisible --name Switchyard || true", **shown).strip()


def _until_none(found: Callable[[], object]) -> None:
    until = time.monotonic() + 120
    while found() and time.monotonic() < until:
        time.sleep(0.2)
    assert not found()


@pytest.fixture
def local(wine: Callable[..., str]) -> str:
    """%LOCALAPPDATA%."""
    return wine("cmd", "/c", "echo %LOCALAPPDATA%").strip().splitlines()[-1]


class TestSetup:
    """The real package."""

    def test_install_use_upgrade_and_remove(self, made: Made, wine: Callable[..., str], local: str) -> None:
        program = f"{local}\\Programs\\Switchyard"
        uninstalling = r"HKCU\Software\Microsoft\Windows\CurrentVersion\Uninstall\Switchyard"
        for folder, version in ((made.older, made.version), (made.newer, NEWER)):
            (setup,) = folder.glob("*-Setup.exe")
            wine(setup, "/S")
            assert wine(f"{program}\\switchyard-cli.exe", "--version").strip() == f"switchyard {version}"
            assert re.search(rf"DisplayVersion\s+REG_SZ\s+{version}\s", wine("reg", "query", uninstalling))
            assert "kernels work: 0" in wine(f"{program}\\python\\python.exe", "-I", "-c", _SELF_TEST)
            registered = wine("reg", "query", r"HKCU\Software\Classes\Switchyard.gguf\shell\open\command")
            assert f'"{program}\\Switchyard.exe" "%1"' in registered
            beside = wine("cmd", "/c", f"dir /b {local}\\Programs").split()
            assert beside == ["Switchyard"]  # neither a part nor the version before is left
        self._write_data(wine, local)
        self._remove(wine, program)
        assert self._data(wine, local) == {"models", "chats.sqlite3"}
        assert "Switchyard" not in wine("cmd", "/c", r"reg query HKCU\Software\Classes /s 2>nul & exit 0")
        assert "Switchyard" not in wine("cmd", "/c", f"reg query {uninstalling} 2>nul & exit 0")

    @pytest.mark.parametrize(
        ("options", "left"),
        [(["/MODELS"], {"chats.sqlite3"}), (["/CHATS"], {"models"}), (["/MODELS", "/CHATS"], set())],
        ids=["models", "chats", "both"],
    )
    def test_removing_takes_models_and_chats_if_asked(
        self, made: Made, wine: Callable[..., str], local: str, options: list[str], left: set[str]
    ) -> None:
        (setup,) = made.older.glob("*-Setup.exe")
        wine(setup, "/S")
        self._write_data(wine, local)
        self._remove(wine, f"{local}\\Programs\\Switchyard", *options)
        assert self._data(wine, local) == left
        named = wine("cmd", "/c", r"dir /s /b C:\users\*switchyard* 2>nul & exit 0").split()
        assert set(named) <= {f"{local}\\Switchyard"}
        assert bool(named) is bool(left)

    def test_a_windows_that_is_too_old_is_refused(self, made: Made, wine: Callable[..., str], local: str) -> None:
        (setup,) = made.older.glob("*-Setup.exe")
        wine("winecfg", "-v", "win7")
        wine(setup, "/S", code=2)
        wine("winecfg", "-v", "win10")
        assert not wine("cmd", "/c", f"dir /b {local}\\Programs\\Switchyard* 2>nul & exit 0").strip()

    def test_removing_in_a_window_asks_about_models_and_chats(
        self, made: Made, wine: Callable[..., str], wine_s: dict[str, str], local: str
    ) -> None:
        (setup,) = made.older.glob("*-Setup.exe")
        program = f"{local}\\Programs\\Switchyard"
        # Not by a pipe, which what a Wine with another display leaves running would keep open.
        silently = ("sh", "-c", 'exec "$@" >/dev/null 2>&1', "sh", WINE)
        wine(setup, "/S")
        self._write_data(wine, local)
        before = self._data(wine, local)
        wine("wineboot", "--kill")  # what was started without a display shows nothing on one
        with try_package.display() as shown:
            run(*silently, f"{program}\\uninstall.exe", **{**wine_s, **shown})
            self._press(shown, "alt+h", "Escape")
            _until_none(lambda: _windows(shown))
            assert wine("cmd", "/c", f"dir /b {program}").strip()
            assert self._data(wine, local) == before
            run(*silently, f"{program}\\uninstall.exe", **{**wine_s, **shown})
            self._press(shown, "alt+m", "alt+h", "alt+h", "Return")
            _until_none(lambda: wine("cmd", "/c", f"dir /b {program} 2>nul & exit 0").strip())
            self._press(shown, "Return")
            _until_none(lambda: _windows(shown))
            wine("wineboot", "--kill")
        assert self._data(wine, local) == {"chats.sqlite3"}

    @staticmethod
    def _press(shown: dict[str, str], *keys: str) -> None:
        run("timeout", "60", "xdotool", "search", "--sync", "--onlyvisible", "--name", "Switchyard", **shown)
        for key in keys:
            time.sleep(1)  # a window takes keys a little later than it is seen
            run("xdotool", "key", "--clearmodifiers", key, **shown)

    def _remove(self, wine: Callable[..., str], program: str, *options: str) -> None:
        wine(f"{program}\\uninstall.exe", "/S", *options)
        # The copy of itself that removes the rest is waited for by nobody.
        _until_none(lambda: wine("cmd", "/c", f"dir /b {program} 2>nul & exit 0").strip())

    @staticmethod
    def _write_data(wine: Callable[..., str], local: str) -> None:
        data = f"{local}\\Switchyard"
        wine("cmd", "/c", f"mkdir {data}\\models\\one {data}\\parts\\engine-1-cpu 2>nul & exit 0")
        for name in ("chats.sqlite3", "models\\one\\weights", "parts\\engine-1-cpu\\torch"):
            wine("cmd", "/c", f"echo . > {data}\\{name}")

    @staticmethod
    def _data(wine: Callable[..., str], local: str) -> set[str]:
        return set(wine("cmd", "/c", f"dir /b {local}\\Switchyard 2>nul & exit 0").split())


_SELF_TEST = """
import ctypes, glob, os, sys, tempfile, zipfile
wheel, = glob.glob(os.path.join(os.path.dirname(sys.executable), '..', 'wheels', 'switchyard_kernels-*.whl'))
folder = tempfile.mkdtemp()
zipfile.ZipFile(wheel).extractall(folder)
library = ctypes.CDLL(glob.glob(os.path.join(folder, 'switchyard_kernels', '*.dll'))[0])
print('kernels work:', library.switchyard_self_test(0))
"""


_SLEEPER = """
#include <windows.h>
#include <stdio.h>
#include <string.h>
int main(int count, char **words) {
    if (count == 2 && !strcmp(words[1], "stay")) puts("here"), fflush(stdout), Sleep(INFINITE);
    return 0;
}
"""
_VERSIONS = ("1.0.0", "2.0.0")
_FILES = 48


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Setup.exe in two versions, for programs of 48 MB that do nothing, or stay."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "it.c").write_text(_SLEEPER)
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu", "-O1"]
    subprocess.run([*compiler, folder / "it.c", "-o", folder / "it.exe"], check=True)
    made = []
    for version in _VERSIONS:
        root = folder / version
        for name in ("python/python.exe", "python/pythonw.exe", "Switchyard.exe"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "it.exe", root / name)
        (root / "window").mkdir()
        for number in range(_FILES):
            (root / "window" / str(number)).write_bytes(random.Random(number).randbytes(1 << 20))
        (root / "bundle.json").write_text(version)
        (root / "uninstall.py").write_text("")
        (root / "switchyard.ico").write_bytes(windows.icon(CHECKOUT / "resources" / "icons" / "logo.svg"))
        project = dataclasses.replace(read_project(), version=version)
        bundle = Bundle(root, PLATFORMS["windows-x86_64"], project, "python/python.exe")
        made.append(windows.build_setup(bundle, folder, 0))
    return made


class Disk:
    """Of the computer under Wine, where people install into a folder whose name has a space and an umlaut.

    Args:
        root: where it is mounted.
        setups: of two versions.
    """

    def __init__(self, wine: Callable[..., str], wine_s: dict[str, str], root: Path, setups: list[Path]) -> None:
        self.wine, self.wine_s, self.root, self.setups = wine, wine_s, root, setups
        self.folder = root / "Jürgens Programme"
        self.program = self.folder / "Switchyard"

    def command(self, number: int) -> list[Path | str]:
        # A name with a space comes last and without quotes.
        return [self.setups[number], "/S", "/D=D:\\Jürgens", "Programme\\Switchyard"]

    def install(self, number: int, code: int = 0) -> None:
        self.wine(*self.command(number), code=code)

    def remove(self) -> None:
        self.wine(self.program / "uninstall.exe", "/S")
        _until_none(self.program.exists)

    def start(self, *command: Path | str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [WINE, *command],
            env={**UNTESTED, **self.wine_s},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stay(self, program: Path) -> subprocess.Popen[bytes]:
        staying = self.start(program, "stay")
        assert staying.stdout.readline().strip() == b"here"
        return staying

    @staticmethod
    def kill(process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass

    def resize(self, megabytes: int, *options: str) -> None:
        run("mount", "-o", ",".join(("remount", f"size={megabytes}m", *options)), self.root)

    @property
    def version(self) -> str:
        """Of the program, which is whole; empty if there is none."""
        if not self.program.exists():
            return ""
        sizes = [path.stat().st_size for path in (self.program / "window").iterdir()]
        assert sizes == [1 << 20] * _FILES
        assert (self.program / "uninstall.exe").exists()
        return (self.program / "bundle.json").read_text()

    @property
    def beside(self) -> list[str]:
        """What is in the folder of programs."""
        return [path.name for path in self.folder.iterdir()] if self.folder.exists() else []


@pytest.fixture
def disk(wine: Callable[..., str], wine_s: dict[str, str], small: list[Path], tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    letter = Path(wine_s["WINEPREFIX"]) / "dosdevices" / "d:"
    with mounted("-t", "tmpfs", "-o", "size=400m", "tmpfs", root):
        letter.unlink(missing_ok=True)
        letter.symlink_to(root)
        yield Disk(wine, wine_s, root, small)
        letter.unlink()


class TestTrouble:
    """What goes wrong leaves the version that is there, and a repeat puts it right."""

    def test_nothing_goes_wrong(self, disk: Disk) -> None:
        for number in (0, 1, 1):
            disk.install(number)
            assert (disk.version, disk.beside) == (_VERSIONS[number], ["Switchyard"])
        disk.remove()
        assert disk.beside == []

    def test_without_room_nothing_is_written(self, disk: Disk) -> None:
        disk.resize(40)
        disk.install(0, code=2)
        assert list(disk.root.iterdir()) == []
        disk.resize(90)
        disk.install(0)
        disk.install(1, code=2)
        assert (disk.version, disk.beside) == ("1.0.0", ["Switchyard"])
        disk.resize(150)
        disk.install(1)
        assert (disk.version, disk.beside) == ("2.0.0", ["Switchyard"])
        disk.remove()

    def test_a_disk_that_fills_up_meanwhile_is_not_kept_full(self, disk: Disk) -> None:
        disk.install(0)
        disk.resize(150)
        film, done = disk.root / "film.mkv", threading.Event()

        def fill() -> None:
            while not (disk.folder / "Switchyard.partial").exists() and not done.wait(0.001):
                pass
            with film.open("wb", buffering=0) as opened, contextlib.suppress(OSError):
                while True:
                    opened.write(bytes(1 << 20))

        filling = threading.Thread(target=fill)
        filling.start()
        try:
            disk.install(1, code=2)
        finally:
            done.set()
            filling.join()
        assert (disk.version, disk.beside) == ("1.0.0", ["Switchyard"])
        film.unlink()
        disk.install(1)
        assert (disk.version, disk.beside) == ("2.0.0", ["Switchyard"])
        disk.remove()

    def test_files_that_cannot_be_made_leave_nothing(self, disk: Disk) -> None:
        disk.resize(400, "nr_inodes=20")
        disk.install(0, code=2)
        assert disk.beside == []

    def test_a_disk_that_is_read_only_stays_as_it_is(self, disk: Disk) -> None:
        disk.resize(400, "ro")
        disk.install(0, code=2)
        disk.resize(400, "rw")
        disk.install(0)
        disk.resize(400, "ro")
        disk.install(1, code=3)
        assert (disk.version, disk.beside) == ("1.0.0", ["Switchyard"])
        disk.resize(400, "rw")
        disk.remove()

    @pytest.mark.parametrize("program", ["python.exe", "pythonw.exe"])
    def test_a_version_that_runs_is_not_touched(self, disk: Disk, program: str) -> None:
        disk.install(0)
        running = disk.stay(disk.program / "python" / program)
        disk.install(1, code=3)
        disk.wine(disk.program / "uninstall.exe", "/S")
        time.sleep(4)  # its copy, which is waited for by nobody, gives up
        assert running.poll() is None
        assert (disk.version, disk.beside) == ("1.0.0", ["Switchyard"])
        disk.kill(running)
        disk.install(1)
        assert (disk.version, disk.beside) == ("2.0.0", ["Switchyard"])
        disk.remove()

    def test_killed_at_random_moments_a_repeat_puts_it_right(self, disk: Disk) -> None:
        disk.install(0)
        # Keeps Wine itself running, which a kill in its own start would leave half started.
        stays = disk.stay(shutil.copy(disk.program / "python" / "python.exe", disk.root / "stays.exe"))
        chance = random.Random(20)
        for number in range(30):
            setup = disk.start(*disk.command(number % 2))
            time.sleep(chance.uniform(0.1, 1.2))
            disk.kill(setup)
            # Gone for an instant, between the old one's new name and the new one's.
            assert disk.version in _VERSIONS or "Switchyard.old" in disk.beside
        disk.kill(stays)
        disk.install(1)
        assert (disk.version, disk.beside) == ("2.0.0", ["Switchyard"])
        disk.remove()
