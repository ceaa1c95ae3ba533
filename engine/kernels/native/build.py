"""Builds the native kernels with the machine's C++ compiler: `python -m engine.kernels.native`.

The library's name contains a hash of its sources, so that an outdated one is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from engine.formats.ggml import GRIDS

_OPTIONS = (
    *("-std=c++17", "-O3", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_WINDOWS_OPTIONS = ("/nologo", "/EHsc", "/MT")
_TIMEOUT_S = 300
_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")


class BuildError(Exception):
    """The kernels could not be built; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """GCC or Clang, under one of their names.

    Attributes:
        command: its program.
        environment: variables to add to this process's environment.
        for_windows: whether it builds Windows libraries.
        first: arguments before all others, such as the target of a cross compiler.
        instead: options that this compiler spells otherwise.
        within_s: the longest that one call may take.
    """

    command: str
    environment: Mapping[str, str] | None = None
    for_windows: bool = sys.platform == "win32"
    first: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    within_s: float = _TIMEOUT_S

    @property
    def is_clang_cl(self) -> bool:
        """Whether it is clang-cl, which takes Microsoft's options, and Clang's only with a prefix."""
        return Path(self.command.replace("\\", "/")).stem.lower().startswith("clang-cl")

    def compile(self, source: Path, target: Path, options: tuple[str, ...]) -> None:
        """Compiles an object file.  Raises `BuildError` on errors."""
        if self.is_clang_cl:
            marked = (f"/clang:{option}" for option in (*_OPTIONS, *options) if option != "-pthread")
            self.run(*_WINDOWS_OPTIONS, *marked, "/c", str(source), f"/Fo{target}")
        else:
            anywhere = () if self.for_windows else ("-fPIC",)  # implied on Windows
            self.run(*_OPTIONS, *anywhere, *options, "-c", str(source), "-o", str(target))

    def link(self, objects: list[Path], target: Path) -> None:
        """Links a shared library.  Raises `BuildError` on errors."""
        if self.is_clang_cl:
            self.run("/nologo", "/LD", "/MT", *map(str, objects), f"/Fe{target}")
        else:
            # On Windows, Python would not find this compiler's C++ library.
            alone = ("-static",) if self.for_windows else ()
            self.run("-shared", "-pthread", *alone, *map(str, objects), "-o", str(target))

    def run(self, *arguments: str) -> None:
        """Runs the compiler; raises `BuildError` with its first error, or if it takes longer than `within_s`."""
        command = [self.command, *self.first, *(self.instead.get(each, each) for each in arguments)]
        environment = {**os.environ, **self.environment} if self.environment else None
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self.within_s,
                check=False,
                env=environment,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{self.command} was not done within {self.within_s / 60:.0f} minutes") from error
        except OSError as error:
            raise BuildError(f"{self.command} could not be run ({error})") from error
        if done.returncode:
            said = done.stderr + done.stdout  # Microsoft's reports errors on stdout
            first = next((line for line in said.splitlines() if "error" in line), said[:200])
            raise BuildError(f"{self.command} failed: {first}")


def find_compiler() -> Compiler:
    """The machine's C++ compiler, or that of the environment's `CXX`.

    Raises:
        BuildError: there is none.
    """
    command = os.environ.get("CXX")
    if not command:
        command = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if command:
        return Compiler(command)
    if sys.platform == "win32" and (found := _visual_studio()) is not None:
        return found
    raise BuildError(f"no C++ compiler was found ({_ADVICE.get(sys.platform, 'on Debian: apt-get install g++')})")


_ADVICE = {
    "win32": "install the Build Tools for Visual Studio with 'C++ Clang Compiler for Windows': "
    "Microsoft's own lacks the vector types that the kernels use",
    "darwin": "run xcode-select --install",
}


def architecture(machine: str | None = None) -> str:
    """`x86`, `arm` or `other`: of this Python, which loads the library.

    Args:
        machine: as named by `platform.machine()`; `None`: this machine.
    """
    name = (machine or platform.machine()).lower()
    if sys.maxsize < 2**32:
        return "other"  # a 32-bit Python on a 64-bit system
    return "x86" if name in _X86 else "arm" if name in _ARM else "other"


def _visual_studio() -> Compiler | None:
    """Visual Studio's Clang, with the variables of its developer prompt, or `None`."""
    programs = Path(os.environ.get("PROGRAMFILES(X86)", r"C:\Program Files (x86)"))
    finder = programs / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
    kind, folder = ("arm64", "ARM64") if architecture() == "arm" else ("x64", "x64")
    wanted = "Microsoft.VisualStudio.Component.VC.Llvm.Clang"
    try:
        found = subprocess.run(
            [finder, "-latest", "-products", "*", "-requires", wanted, "-property", "installationPath"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        prompt = Path(found) / "VC" / "Auxiliary" / "Build" / "vcvarsall.bat"
        command = Path(found) / "VC" / "Tools" / "Llvm" / folder / "bin" / "clang-cl.exe"
        if not found or not prompt.exists() or not command.exists():
            return None
        listing = subprocess.run(
            f'call "{prompt}" {kind} >nul && set', shell=True, capture_output=True, text=True, timeout=120, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return Compiler(str(command), environment=parse_variables(listing))


def parse_variables(listing: str) -> dict[str, str]:
    """Parses the output of Windows' `set`; names in upper case."""
    pairs = (line.partition("=") for line in listing.splitlines())
    return {name.upper(): value for name, equals, value in pairs if equals and name}


__all__ = [
    "BuildError",
    "build",
    "compile_object",
    "compile_sources",
    "find_compiler",
    "library_name",
    "library_path",
    "outdated_libraries",
]

_FOLDER = Path(__file__).resolve().parent
_SOURCES = _FOLDER / "src"
_SUFFIX = ".dll" if sys.platform == "win32" else ".so"


@dataclass(frozen=True, slots=True)
class _Special:
    """A source for one kind of CPU.

    Attributes:
        options: for instructions that not every CPU of the kind has.
        newest: options unknown to older compilers, which build the source without kernels.
    """

    architecture: str
    options: tuple[str, ...] = ()
    newest: tuple[str, ...] = ()


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma")
_BF16 = ("-mavx512vnni", "-mavx512bf16")
_SPECIAL = {
    "attend_avx2.cpp": _Special("x86", _AVX2),
    "attend_avx512.cpp": _Special("x86", _AVX512),
    "attend_avx512bf16.cpp": _Special("x86", _AVX512, newest=_BF16),
    "blocks_avx2.cpp": _Special("x86", _AVX2),
    "blocks_avx512.cpp": _Special("x86", _AVX512),
    "kernels_avx2.cpp": _Special("x86", _AVX2),
    "kernels_avx512.cpp": _Special("x86", _AVX512),
    "many_avx2.cpp": _Special("x86", _AVX2),
    "many_avx512.cpp": _Special("x86", _AVX512),
    "many_avx512bf16.cpp": _Special("x86", _AVX512, newest=_BF16),
    "many_amx.cpp": _Special("x86", _AVX512, newest=(*_BF16, "-mamx-tile", "-mamx-bf16")),
    "rows_avx2.cpp": _Special("x86", _AVX2),
    "rows_avx512vnni.cpp": _Special("x86", (*_AVX512, "-mf16c", "-mavx512vnni")),
    "tiles_avx2.cpp": _Special("x86", _AVX2),
    "tiles_avxvnni.cpp": _Special("x86", _AVX2, newest=("-mavxvnni",)),
    "tiles_avx512.cpp": _Special("x86", _AVX512),
    "tiles_avx512vnni.cpp": _Special("x86", (*_AVX512, "-mavx512vnni")),
    "attend_neon.cpp": _Special("arm"),
    "kernels_neon.cpp": _Special("arm"),
    "many_neon.cpp": _Special("arm"),
    "rows_neon.cpp": _Special("arm"),
    "rows_neondot.cpp": _Special("arm", ("-march=armv8.2-a+dotprod",)),
    "rows_neoni8mm.cpp": _Special("arm", ("-march=armv8.2-a+dotprod",), newest=("-march=armv8.2-a+dotprod+i8mm",)),
    "tiles_neon.cpp": _Special("arm"),
    "tiles_neondot.cpp": _Special("arm", ("-march=armv8.2-a+dotprod",)),
}


def library_path() -> Path:
    """The path of the library for these sources: built here, else from the wheel of kernels."""
    name = library_name(platform.machine().lower(), _SUFFIX)
    built = _FOLDER / "built" / name
    wheel = find_spec("switchyard_kernels")
    if wheel is None or wheel.origin is None or built.exists():
        return built
    delivered = Path(wheel.origin).with_name(name)
    return delivered if delivered.exists() else built


@cache
def library_name(machine: str, suffix: str) -> str:
    """File name of the library of these sources for a machine, as `platform.machine()` names it in lower case."""
    digest = hashlib.sha256()
    for source in [*sorted(path for path in _SOURCES.rglob("*") if path.is_file()), GRIDS]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"switchyard_kernels-{digest.hexdigest()[:16]}-{machine}{suffix}"


def outdated_libraries() -> list[Path]:
    """Libraries built from other sources: by another version of this program, or for another machine."""
    current = library_path()
    return [path for path in current.parent.glob(f"switchyard_kernels-*{_SUFFIX}") if path != current]


def build() -> Path:
    """Compiles the library unless it exists."""
    target = library_path()
    if target.exists():
        return target
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = compile_sources(compiler, Path(scratch))
        linked = Path(scratch) / f"linked{_SUFFIX}"
        compiler.link(objects, linked)
        # Renamed into place: another process sees a complete library or none.
        linked.replace(target)
    for outdated in outdated_libraries():
        with suppress(OSError):  # Windows locks libraries in use
            outdated.unlink()
    for verdict in target.parent.glob("*.proven.json"):
        if not verdict.with_suffix("").with_suffix(_SUFFIX).exists():
            verdict.unlink(missing_ok=True)
    return target


def compile_sources(
    compiler: Compiler, folder: Path, more: tuple[str, ...] = (), machine: str | None = None
) -> list[Path]:
    """The objects of all sources for a kind of processor, in `folder`; `more`: extra options.

    Args:
        machine: target as named by `platform.machine()`, for cross compilers; `None`: this machine.
    """
    kind = architecture(machine)
    sources = [
        source
        for source in sorted(_SOURCES.glob("*.cpp"))
        if source.name not in _SPECIAL or _SPECIAL[source.name].architecture == kind
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(partial(_compile, compiler, folder=folder, more=more), sources))


def compile_object(compiler: Compiler, name: str, folder: Path, more: tuple[str, ...] = ()) -> Path:
    """The object of one source, in `folder`."""
    return _compile(compiler, _SOURCES / name, folder, more)


def _compile(compiler: Compiler, source: Path, folder: Path, more: tuple[str, ...]) -> Path:
    compiled = folder / f"{source.stem}.o"
    special = _SPECIAL.get(source.name, _Special("any"))
    try:
        compiler.compile(source, compiled, (*special.options, *special.newest, *more))
    except BuildError:
        if not special.newest:
            raise
        compiler.compile(source, compiled, (*special.options, *more))  # builds the source without kernels
    return compiled
