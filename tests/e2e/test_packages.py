"""Real packages of this checkout, in two versions: made, installed, used, upgraded and removed.

Half an hour on two cores, and the package index. `SWITCHYARD_PACKAGES` names a folder that keeps the packages for the
next run, which then tries those.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "installers"))

import try_package  # noqa: E402

TRY = CHECKOUT / "installers" / "try_package.py"
WINE = Path("/usr/lib/wine/wine64")
NEWER = "9.0.0"
_OF_TESTS = ("SWITCHYARD_", "XDG_", "PYTHON", "PYTEST_", "HF_", "QT_", "OMP_", "TMPDIR")
UNTESTED = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TESTS)}
"""As users have them: without the folders of the tests, which other users cannot read, and without their settings."""
LOGIN = ("env", "-i", "HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")
"""Before a command in another system, which has none of our folders."""
_TOOLS = ("makeself", "makensis", "patchelf", "dpkg-deb", "Xvfb", "xdotool", "git")
_MISSING = [name for name in _TOOLS if shutil.which(name) is None]
_MISSING += [name for name in ("uv", "ziglang", "pefile") if find_spec(name) is None]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(platform.system() != "Linux" or bool(_MISSING), reason=f"needs {', '.join(_MISSING)}"),
]


def run(*command: str | Path, code: int = 0, **variables: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env={**UNTESTED, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = done.stdout.decode(errors="replace").replace("\r\n", "\n")
    assert done.returncode == code, text[-3000:]
    return text


@dataclass(frozen=True)
class Made:
    """Packages of two versions.

    Attributes:
        older: folder of the checkout's version, with all wheels, and with the engine's part where it can be had.
        newer: folder of the next one.
    """

    older: Path
    newer: Path
    version: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    kept = os.environ.get("SWITCHYARD_PACKAGES")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("packages")
    older, newer = folder / "older", folder / "newer"
    text = (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    assert found
    if not list(newer.glob("*-Setup.exe")):  # the last one
        make_packages(folder / "tree", folder / "near", older, newer, text.replace(found[0], f'version = "{NEWER}"'))
    yield Made(older, newer, found[1])
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


def make_packages(tree: Path, near: Path, older: Path, newer: Path, newer_project: str) -> None:
    near.mkdir(parents=True)
    for name in run("git", "-C", CHECKOUT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (CHECKOUT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, tree / name)
    release: list[str | Path] = [sys.executable, tree / "installers" / "release.py", "run", "deb", "setup"]
    options: list[str | Path] = ["--debian-python", "--quick", "--near", near, "--out"]
    offline = ["offline"] if offer_processors(tree / "installers" / "engine-lock.json", near) else []
    run(*release, "wheels", *offline, *options, older, PYTHONPATH=str(tree))
    (tree / "pyproject.toml").write_text(newer_project, encoding="utf-8")
    run(*release, *options, newer, PYTHONPATH=str(tree))


def offer_processors(lock: Path, near: Path) -> bool:
    """Fetches PyTorch's build for processors from this machine's indices, and adds it to a list that lacks it.

    Returns:
        Whether it can be had.
    """
    document = json.loads(lock.read_text(encoding="utf-8"))
    here, python = f"linux-{platform.machine()}", f"{sys.version_info.major}.{sys.version_info.minor}"
    lists = {each["build"]: each for each in document["lists"] if (each["platform"], each["python"]) == (here, python)}
    wanted = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", near, f"torch=={document['torch']}+cpu"]
    if subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=False).returncode != 0:
        return False
    if "cpu" in lists:
        return True
    (wheel,) = near.glob("torch-*.whl")
    document["wheels"][wheel.name] = {
        "name": "torch",
        "version": f"{document['torch']}+cpu",
        "url": f"https://download.pytorch.org/whl/cpu/{wheel.name.replace('+', '%2B')}",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "bytes": wheel.stat().st_size,
    }
    cards = ("nvidia_cu", "nvidia_n", "cuda_", "triton-", "torch-")
    files = [file for file in lists["cu130"]["files"] if not file.startswith(cards) or file.startswith("nvidia_ml_py")]
    document["lists"].append({"platform": here, "python": python, "build": "cpu", "files": [*files, wheel.name]})
    lock.write_text(json.dumps(document), encoding="utf-8")
    return True


@contextmanager
def least_debian(folder: Path, release: str, *options: str) -> Iterator[Path]:
    """The least system that apt runs on."""
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.skip("needs debootstrap, and its rights")
    root = folder / "root"
    # What is mounted in it ends with the command, so the folder can be removed.
    run("unshare", "--mount", "debootstrap", "--variant=minbase", *options, release, root)
    yield root
    mounted = Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert str(root) not in mounted
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Debian 12 which trusts whom this machine trusts."""
    with least_debian(tmp_path_factory.mktemp("debian"), "bookworm", "--include=ca-certificates,xz-utils") as root:
        for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):
            shutil.copy2(certificate, root / "usr" / "local" / "share" / "ca-certificates")
        run("chroot", root, *LOGIN, "update-ca-certificates")
        yield root


def test_packages_install_answer_upgrade_and_leave_nothing(made: Made, debian: Path) -> None:
    said = run(sys.executable, TRY, made.older, "--newer", made.newer, "--root", debian)
    assert said.count(f"installed, used, upgraded to {NEWER} and removed") == 2
    if list(made.older.glob("*-engine-*.zip")):
        assert said.count("the starter answered") == 4


def test_two_versions_stand_side_by_side(made: Made, debian: Path) -> None:
    (package,), (archive,) = made.older.glob("*_amd64.deb"), made.newer.glob("*.run")
    folder = debian / "tmp" / "side by side"
    folder.mkdir(mode=0o755)
    for each in (package, archive):
        shutil.copyfile(each, folder / each.name)
    with try_package.administrator(debian) as admin:
        admin.step("install", ["apt-get", "install", "-y", "-qq", admin.seen(folder / package.name)])
        with try_package.somebody(admin, folder / "home") as user:
            user.step("install", ["sh", user.seen(folder / archive.name)])
            older, newer = Path("/usr/bin/switchyard"), user.seen(folder / "home" / ".local" / "bin" / "switchyard")
            try_package.use([older], user, made.version)
            try_package.use([newer], user, NEWER)
            with try_package.display() as shown:
                environment = {**user.variables, **shown}
                window = subprocess.Popen([*user.prefix, older], env=environment, cwd="/")
                run("timeout", "60", "xdotool", "search", "--sync", "--onlyvisible", "--name", "Switchyard", **shown)
                user.step("the other one", [newer], **shown)  # brings the window forward, and ends
                assert window.poll() is None
                window.terminate()
                window.wait(30)
            user.step("remove", [user.seen(folder / "home" / ".local" / "bin" / "switchyard-uninstall")])
            try_package.use([older], user, made.version)
        admin.step("remove", ["apt-get", "purge", "-y", "-qq", "--autoremove", "switchyard"])
    shutil.rmtree(folder)


def test_a_program_on_a_disk_that_is_read_only_works(made: Made, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount")
    (package,) = made.older.glob("*_amd64.deb")
    disk, home = tmp_path / "disk", tmp_path / "home"
    home.mkdir()
    run("dpkg", "-x", package, disk)
    locked = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; shift; exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-euc", locked, "sh", str(disk))
    user = try_package.User({**UNTESTED, "HOME": str(home)}, prefix)
    with pytest.raises(try_package.StepError, match="Read-only file system"):
        user.step("writing", ["touch", disk / "opt" / "written"])
    try_package.use([disk / "opt" / "switchyard" / "switchyard"], user, made.version)


@pytest.mark.parametrize(
    ("release", "architecture", "sentence"),
    [
        ("bullseye", "amd64", "Switchyard needs glibc 2.36 or newer, and this system has 2.31: "),
        ("bookworm", "i386", "for 64-bit systems, and this one's programs are of 32 bits: "),
    ],
)
def test_a_system_that_does_not_suit_is_told_in_a_sentence(
    made: Made, tmp_path: Path, release: str, architecture: str, sentence: str
) -> None:
    (archive,) = made.older.glob("*.run")
    with least_debian(tmp_path, release, f"--arch={architecture}", "--include=xz-utils") as root:
        shutil.copyfile(archive, root / "tmp" / "it.run")
        said = run("chroot", root, *LOGIN, "/bin/sh", "/tmp/it.run", code=2)
        assert sentence in said.splitlines()[-1]
        assert not list((root / "root").glob(".local/**/*"))


def test_desktops_understand_what_is_installed(made: Made, debian: Path) -> None:
    (package,) = made.older.glob("*_amd64.deb")
    run("dpkg", "-x", package, debian / "shown")
    share = Path("/shown/usr/share")
    with try_package.administrator(debian) as admin:
        tools = ["appstream", "desktop-file-utils", "shared-mime-info"]
        admin.step("lists", ["apt-get", "update", "-qq"])
        admin.step("tools", ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *tools])
        admin.step("entry", ["desktop-file-validate", share / "applications" / "switchyard.desktop"])
        information = share / "metainfo" / "io.switchyard.Switchyard.metainfo.xml"
        admin.step("information", ["appstreamcli", "validate", "--no-net", information])
        admin.step("kinds of files", ["update-mime-database", share / "mime"])
    assert "application/x-gguf:*.gguf" in (debian / "shown/usr/share/mime/globs2").read_text(encoding="utf-8")


def test_the_sums_are_those_of_the_files(made: Made) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=made.older, check=True)


@pytest.mark.parametrize("installer", ["uv", "pipx"])
def test_wheels_give_command_and_window_and_go(made: Made, tmp_path: Path, installer: str) -> None:
    program = shutil.which(installer, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip(f"needs {installer}")
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    near = [made.older, made.older.parent / "near"]
    variables = UNTESTED | {
        "HOME": str(home),
        "UV_TOOL_DIR": str(tools / "uv"),
        "UV_TOOL_BIN_DIR": str(tools / "bin"),
        "UV_FIND_LINKS": ",".join(map(str, near)),
        "UV_PYTHON": sys.executable,
        "PIPX_HOME": str(tools / "pipx"),
        "PIPX_BIN_DIR": str(tools / "bin"),
        "PIPX_MAN_DIR": str(tools / "man"),
        "PIP_FIND_LINKS": " ".join(map(str, near)),
    }
    if list(made.older.parent.glob("near/torch-*.whl")):  # else the newest one, which may be for cards
        constraint = tmp_path / "constraint.txt"
        constraint.write_text("torch==" + next(made.older.parent.glob("near/torch-*.whl")).name.split("-")[1])
        variables |= {"UV_CONSTRAINT": str(constraint), "PIP_CONSTRAINT": str(constraint)}
    user = try_package.User(variables)
    install = [program, "tool", "install"] if installer == "uv" else [program, "install", "--python", sys.executable]
    (wheel,) = made.older.glob("switchyard-*-py3-none-any.whl")  # by its path: the name is another project's on PyPI
    user.step("install", [*install, wheel])
    command = tools / "bin" / "switchyard"
    try_package.use([command], user, made.version)
    try_package.ask(command, None, user)
    user.step("remove", [program, *(["tool"] if installer == "uv" else []), "uninstall", "switchyard"])
    assert not [path for path in tools.rglob("switchyard*") if "logs" not in path.parts]


@pytest.fixture(scope="module")
def wine_s(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a Wine of its own, without a display."""
    places = dict.fromkeys(("WINEPREFIX", "TMP", "TEMP", "TMPDIR"), str(tmp_path_factory.mktemp("wine")))
    return {"WINEDEBUG": "-all", "DISPLAY": "", **places}


@pytest.fixture(scope="module")
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


@pytest.fixture
def local(wine: Callable[..., str]) -> str:
    """%LOCALAPPDATA%."""
    return wine("cmd", "/c", "echo %LOCALAPPDATA%").strip().splitlines()[-1]


@pytest.mark.skipif(not WINE.exists(), reason="needs wine64")
class TestSetup:
    """Windows' package under Wine: everything but the window, for which Wine's Windows is not enough."""

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
            self._until_none(lambda: _windows(shown))
            assert wine("cmd", "/c", f"dir /b {program}").strip()
            assert self._data(wine, local) == before
            run(*silently, f"{program}\\uninstall.exe", **{**wine_s, **shown})
            self._press(shown, "alt+m", "alt+h", "alt+h", "Return")
            self._until_none(lambda: wine("cmd", "/c", f"dir /b {program} 2>nul & exit 0").strip())
            self._press(shown, "Return")
            self._until_none(lambda: _windows(shown))
            wine("wineboot", "--kill")
        assert self._data(wine, local) == {"chats.sqlite3"}

    @staticmethod
    def _press(shown: dict[str, str], *keys: str) -> None:
        run("timeout", "60", "xdotool", "search", "--sync", "--onlyvisible", "--name", "Switchyard", **shown)
        for key in keys:
            time.sleep(1)  # a window takes keys a little later than it is seen
            run("xdotool", "key", "--clearmodifiers", key, **shown)

    @staticmethod
    def _until_none(found: Callable[[], str]) -> None:
        until = time.monotonic() + 120
        while found() and time.monotonic() < until:
            time.sleep(1)
        assert not found()

    def _remove(self, wine: Callable[..., str], program: str, *options: str) -> None:
        wine(f"{program}\\uninstall.exe", "/S", *options)
        # The copy of itself that removes the rest is waited for by nobody.
        self._until_none(lambda: wine("cmd", "/c", f"dir /b {program} 2>nul & exit 0").strip())

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
