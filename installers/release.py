#!/usr/bin/env python3
"""Makes the packages that people download, from a checkout that has been set up.

    .venv/bin/python installers/release.py wheels            switchyard, -app, -engine, and -kernels for each platform
    .venv/bin/python installers/release.py deb run setup     packages for this kind of machine, and for Windows
    .venv/bin/python installers/release.py appimage app      their folders; with --runtime, or on a Mac, packages
    .venv/bin/python installers/release.py offline           the engine's part of this machine's kind, as one file
    .venv/bin/python installers/release.py window list       a newer version for installed packages, and the signed list
    .venv/bin/python installers/release.py engines           nothing: reads all builds of the engine's part for Windows
    .venv/bin/python installers/release.py all               all that can be made here; the rest is said

They come into `dist` (`--out`). Needed: `pip install --group release`, and of Debian's packages makeself, nsis and
patchelf. With `--debian-python` packages for Linux hold Debian's own Python instead of one that uv fetches.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packages import linux, macos, windows
from packages.bundle import Bundle, has_kernels, lay_out, python_of
from packages.kernels import PLATFORMS, build_kernels_wheel
from packages.offline import builds_of, write_offline_file
from packages.project import CHECKOUT, PackagingError
from packages.pythons import DEBIAN_VERSION, VERSION
from packages.update import new_key, write_list, write_window
from packages.wheels import build_wheels


@dataclass(frozen=True)
class Making:
    """What the makers of packages share.

    Attributes:
        out: where packages go.
        uv: its program.
        platform: name of the platform of packages for Linux, and of the offline file.
        debian_python: see the module.
        build: of PyTorch, in the offline file.
        near: folders with wheels for the offline file that need not be fetched.
        address, key, notes: of the list of newer versions.
        level: of compression.
        runtime: of AppImages; None for their folder alone.
    """

    out: Path
    uv: Path
    platform: str
    debian_python: bool
    build: str
    near: tuple[Path, ...]
    address: str
    key: Path
    notes: str
    level: int
    runtime: Path | None

    @property
    def glibc(self) -> str:
        """The oldest C library on which a package for Linux runs."""
        return linux.oldest_glibc(self.platform, debian_python=self.debian_python)

    def lay_out(self, platform: str, packaged_as: str, folder: str) -> Bundle:
        """A program's folder, in a new folder; kernels for it are compiled if there are none of the checkout's."""
        target = PLATFORMS[platform]
        if not has_kernels(target, self.out):
            build_kernels_wheel(target, self.out)
        return lay_out(
            target,
            Path(folder) / "root",
            self.out,
            packaged_as,
            uv=self.uv,
            debian_python=self.debian_python and platform.startswith("linux"),
        )


def make_wheels(making: Making) -> list[Path]:
    """Our own wheels."""
    return [
        *build_wheels(making.out),
        *(build_kernels_wheel(platform, making.out) for platform in PLATFORMS.values()),
    ]


def make_deb(making: Making) -> list[Path]:
    """For Debian and its relatives."""
    return _for_linux(making, "deb", lambda bundle: linux.build_deb(bundle, making.out, making.glibc, making.level))


def make_run(making: Making) -> list[Path]:
    """For any Linux, without rights."""
    return _for_linux(making, "run", lambda bundle: linux.build_run(bundle, making.out, making.glibc, making.level))


def make_appimage(making: Making) -> list[Path]:
    """For any Linux, without installing."""
    return _for_linux(making, "appimage", lambda bundle: linux.build_appimage(bundle, making.out, making.runtime))


def _for_linux(making: Making, packaged_as: str, build: Callable[[Bundle], Path]) -> list[Path]:
    with tempfile.TemporaryDirectory(prefix="switchyard-linux-", dir=making.out) as folder:
        bundle = making.lay_out(making.platform, packaged_as, folder)
        linux.finish(bundle, making.glibc)
        return [build(bundle)]


def make_setup(making: Making) -> list[Path]:
    """For Windows."""
    with tempfile.TemporaryDirectory(prefix="switchyard-windows-", dir=making.out) as folder:
        bundle = making.lay_out("windows-x86_64", "nsis", folder)
        windows.finish(bundle)
        return [windows.build_setup(bundle, making.out, making.level)]


def make_app(making: Making) -> list[Path]:
    """For macOS; the disk image only on a Mac."""
    with tempfile.TemporaryDirectory(prefix="switchyard-macos-", dir=making.out) as folder:
        bundle = making.lay_out("macos-arm64", "dmg", folder)
        app = macos.build_app(bundle, making.out)
        if platform.system() != "Darwin":
            return [app]
        return [macos.build_dmg(app, bundle.project.version, making.out)]


def make_offline(making: Making) -> list[Path]:
    """The engine's part for machines without a connection."""
    python = DEBIAN_VERSION if making.debian_python else VERSION
    return [write_offline_file(making.out, making.platform, python, making.build, making.near)]


def check_engines(making: Making) -> list[Path]:
    """For Windows: whether each listed build of the engine's part has all libraries that it imports."""
    with tempfile.TemporaryDirectory(prefix="switchyard-engines-", dir=making.out) as folder:
        bundle = making.lay_out("windows-x86_64", "nsis", folder)
        windows.bring_runtime(bundle.root)
        for build in builds_of(bundle.platform.name, python_of(bundle)):
            windows.check_engine(bundle, build)
            print(f"engines: {bundle.platform.name} {build} has all libraries that it imports", flush=True)
    return []


def make_window(making: Making) -> list[Path]:
    """A newer version of the window, for installed packages on Linux and Windows."""
    made = []
    for name in (making.platform, "windows-x86_64"):
        with tempfile.TemporaryDirectory(prefix="switchyard-window-", dir=making.out) as folder:
            made.append(write_window(making.lay_out(name, "update", folder), making.out))
    return made


def make_list(making: Making) -> list[Path]:
    """The list that installed packages look at."""
    return [write_list(making.out, making.address, making.key, making.notes)]


def make_key(making: Making) -> list[Path]:
    """A key to sign the list with."""
    print(f"Public key, for resources/updates.json: {new_key(making.key)}")
    return [making.key]


MAKERS = {
    "wheels": make_wheels,
    "deb": make_deb,
    "run": make_run,
    "appimage": make_appimage,
    "setup": make_setup,
    "app": make_app,
    "offline": make_offline,
}
ASKED_FOR = {"window": make_window, "list": make_list, "key": make_key, "engines": check_engines}
"""Not among `all`."""


def main(arguments: list[str]) -> int:
    """0; 2 if something was asked for that cannot be made here, with one sentence each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*MAKERS, *ASKED_FOR, "all"])
    parser.add_argument("--out", type=Path, default=CHECKOUT / "dist")
    parser.add_argument("--platform", choices=[name for name in PLATFORMS if name.startswith("linux")])
    parser.add_argument("--debian-python", action="store_true")
    parser.add_argument("--build", default="cpu", help="of PyTorch, in the offline file")
    parser.add_argument("--near", type=Path, nargs="*", default=[], help="folders with wheels for the offline file")
    parser.add_argument("--quick", action="store_true", help="larger packages, sooner: to try them")
    parser.add_argument("--address", default="", help="where installed packages find the list and the windows")
    parser.add_argument("--key", type=Path, default=Path("switchyard-updates.pem"), help="file with the private key")
    parser.add_argument("--runtime", type=Path, help="of AppImages (type 2); without one their folder is made")
    parser.add_argument("--notes", default="", help="a line on what is new")
    said = parser.parse_args(arguments)
    out = said.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        making = Making(
            out,
            _uv(),
            said.platform or "linux-x86_64",
            said.debian_python,
            said.build,
            tuple(said.near),
            said.address,
            said.key,
            said.notes,
            0 if said.quick else 4,
            said.runtime,
        )
        wanted = list(MAKERS) if "all" in said.what else list(dict.fromkeys(said.what))
        if "wheels" not in wanted and not {"offline", "list", "key"}.issuperset(wanted):
            build_wheels(out)  # quickly done, and a package never has an older window than the checkout
    except PackagingError as problem:
        print(problem, file=sys.stderr)
        return 2
    problems = 0
    for what in sorted(wanted, key=lambda each: each != "wheels"):  # which the others hold
        try:
            made = {**MAKERS, **ASKED_FOR}[what](making)
        except PackagingError as problem:
            print(f"{what}: {problem}", file=sys.stderr)
            problems += 1
            continue
        for package in made:
            size = sum(each.stat().st_size for each in (package.rglob("*") if package.is_dir() else [package]))
            print(f"{what}: {package.name}, {size / 1e6:.1f} MB", flush=True)
    _write_sums(out)
    return 2 if problems else 0


def _uv() -> Path:
    program = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if program is None:
        raise PackagingError("uv is missing: run `pip install --group release`, then the same command again.")
    return Path(program)


def _write_sums(out: Path) -> None:
    """SHA256SUMS: what people check downloads by."""
    lines = []
    for path in sorted(each for each in out.iterdir() if each.is_file() and each.name != "SHA256SUMS"):
        with path.open("rb") as opened:
            lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {path.name}\n")
    (out / "SHA256SUMS").write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
