"""Real packages of this checkout: made, installed, used and removed.  Minutes, and the package index."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
WINE = Path("/usr/lib/wine/wine64")
_TOOLS = ("makeself", "makensis", "patchelf", "dpkg-deb", "Xvfb", "xdotool")
_MISSING = [name for name in _TOOLS if shutil.which(name) is None]
_MISSING += [name for name in ("uv", "ziglang", "pefile") if find_spec(name) is None]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(platform.system() != "Linux" or bool(_MISSING), reason=f"needs {', '.join(_MISSING)}"),
]


def run(*command: str | Path, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    release = CHECKOUT / "installers" / "release.py"
    run(sys.executable, release, "wheels", "run", "deb", "setup", "--out", folder, "--debian-python")
    return folder


def test_packages_of_this_system_install_and_leave_nothing(dist: Path) -> None:
    said = run(sys.executable, CHECKOUT / "installers" / "try_package.py", dist)
    assert "installed, used" in said


def test_the_sums_are_those_of_the_files(dist: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)


@pytest.mark.skipif(not WINE.exists(), reason="needs wine64")
class TestSetup:
    """Windows' package under Wine: everything but the window, for which Wine's Windows is not enough."""

    @pytest.fixture(scope="class")
    def wine(self, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
        prefix = tmp_path_factory.mktemp("wine")

        def wine(*command: str | Path) -> str:
            return run(WINE, *command, WINEPREFIX=str(prefix), WINEDEBUG="-all", DISPLAY="")

        wine("winecfg", "-v", "win10")
        return wine

    def test_install_use_and_remove(self, dist: Path, wine: Callable[..., str], tmp_path: Path) -> None:
        (setup,) = dist.glob("*-Setup.exe")
        wine(setup, "/S")
        folder = wine("cmd", "/c", "echo %LOCALAPPDATA%").strip().splitlines()[-1]
        program = f"{folder}\\Programs\\Switchyard"
        assert wine(f"{program}\\switchyard-cli.exe", "--version").strip().endswith("0.1.0")
        kernels = wine(f"{program}\\python\\python.exe", "-I", "-c", _SELF_TEST)
        assert "kernels work: 0" in kernels
        registered = wine("reg", "query", r"HKCU\Software\Classes\Switchyard.gguf\shell\open\command")
        assert "Switchyard.exe" in registered
        wine(setup, "/S")  # over itself
        wine(f"{program}\\uninstall.exe", "/S")
        until = time.monotonic() + 120
        while "bundle.json" in wine("cmd", "/c", f"dir /b {program} 2>nul & exit 0") and time.monotonic() < until:
            time.sleep(1)
        assert "bundle.json" not in wine("cmd", "/c", f"dir /b {program} 2>nul & exit 0")


_SELF_TEST = """
import ctypes, glob, os, sys, tempfile, zipfile
wheel, = glob.glob(os.path.join(os.path.dirname(sys.executable), '..', 'wheels', 'switchyard_kernels-*.whl'))
folder = tempfile.mkdtemp()
zipfile.ZipFile(wheel).extractall(folder)
library = ctypes.CDLL(glob.glob(os.path.join(folder, 'switchyard_kernels', '*.dll'))[0])
print('kernels work:', library.switchyard_self_test(0))
"""
