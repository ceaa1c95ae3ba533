"""Builds the native kernels with the machine's C++ compiler: `python -m engine.kernels.native`.

The library's name carries a hash of its sources, so that one built from others is never loaded by mistake.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_SOURCES = _FOLDER / "src"
_COMMON = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_X86 = ("x86_64", "amd64")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma")
_NEWEST = "-mavxvnni"
"""Instructions that compilers of some years ago do not know."""
_FLAGS: dict[str, tuple[str, ...]] = {
    "kernels_avx2.cpp": _AVX2,
    "kernels_avx512.cpp": _AVX512,
    "tiles_avx2.cpp": _AVX2,
    "tiles_avxvnni.cpp": (*_AVX2, _NEWEST),
    "tiles_avx512.cpp": _AVX512,
    "tiles_avx512vnni.cpp": (*_AVX512, "-mavx512vnni"),
}


class BuildError(Exception):
    """The kernels could not be built; the message is one sentence."""


def library_path() -> Path:
    """Where the library for these sources lies once it is built."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _FOLDER / "built" / f"switchyard_kernels-{digest.hexdigest()[:16]}-{platform.machine().lower()}.so"


def build() -> Path:
    """Compiles what is not compiled yet.

    Raises:
        BuildError: without a compiler, or where it refuses the sources.
    """
    target = library_path()
    if target.exists():
        return target
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = compile_sources(compiler, Path(scratch))
        linked = Path(scratch) / "linked.so"
        _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        # Renamed into place: another process sees no library or a whole one.
        linked.replace(target)
    for outdated in target.parent.glob("switchyard_kernels-*.so"):
        if outdated != target:
            outdated.unlink(missing_ok=True)
    return target


def find_compiler() -> str:
    """The machine's C++ compiler, or that of the environment's `CXX`.

    Raises:
        BuildError: there is none.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler was found (on Debian: apt-get install g++)")
    return compiler


def compile_sources(compiler: str, folder: Path, more: tuple[str, ...] = ()) -> list[Path]:
    """The objects of all sources for this kind of processor, in `folder`; `more` options come last.

    Raises:
        BuildError: the compiler refuses them.
    """
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(partial(_compile, compiler, folder=folder, more=more), _sources_for_this_machine()))


def _sources_for_this_machine() -> list[Path]:
    sources = sorted(_SOURCES.glob("*.cpp"))
    return [source for source in sources if source.name not in _FLAGS or platform.machine().lower() in _X86]


def _compile(compiler: str, source: Path, folder: Path, more: tuple[str, ...]) -> Path:
    compiled = folder / f"{source.stem}.o"
    flags = _FLAGS.get(source.name, ())

    def run(flags: tuple[str, ...]) -> None:
        _run([compiler, *_COMMON, *flags, *more, "-c", str(source), "-o", str(compiled)])

    try:
        run(flags)
    except BuildError:
        if _NEWEST not in flags:
            raise
        run(tuple(flag for flag in flags if flag != _NEWEST))  # the source then has no kernels
    return compiled


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} could not be run ({error})") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise BuildError(f"{command[0]} failed: {first}")
