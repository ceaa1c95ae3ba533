"""Builds the native kernels with the machine's C++ compiler: `python -m engine.kernels.native`.

The library's name contains a hash of its sources, so that an outdated one is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.kernels.native.compilers import BuildError, Compiler, architecture, find_compiler

__all__ = ["BuildError", "build", "compile_sources", "find_compiler", "library_path", "outdated_libraries"]

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


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma")
_PAGED = ("-ffp-contract=fast", "-Wno-psabi")
"""Allows vectors wider than the target's, and FMA contraction."""
_BF16 = ("-mavx512vnni", "-mavx512bf16")
_SPECIAL = {
    "kernels_avx2.cpp": _Special("x86", _AVX2),
    "kernels_avx512.cpp": _Special("x86", _AVX512),
    "many_avx2.cpp": _Special("x86", _AVX2),
    "many_avx512.cpp": _Special("x86", _AVX512),
    "many_avx512bf16.cpp": _Special("x86", _AVX512, newest=_BF16),
    "many_amx.cpp": _Special("x86", _AVX512, newest=(*_BF16, "-mamx-tile", "-mamx-bf16")),
    "paged_avx2.cpp": _Special("x86", (*_AVX2, *_PAGED)),
    "paged_avx512.cpp": _Special("x86", (*_AVX512, *_PAGED)),
    "tiles_avx2.cpp": _Special("x86", _AVX2),
    "tiles_avxvnni.cpp": _Special("x86", _AVX2, newest=("-mavxvnni",)),
    "tiles_avx512.cpp": _Special("x86", _AVX512),
    "tiles_avx512vnni.cpp": _Special("x86", (*_AVX512, "-mavx512vnni")),
    "kernels_neon.cpp": _Special("arm"),
    "paged_neon.cpp": _Special("arm", _PAGED),
    "tiles_neon.cpp": _Special("arm"),
    "tiles_neondot.cpp": _Special("arm", ("-march=armv8.2-a+dotprod",)),
}


def library_path() -> Path:
    """The path of the library for these sources."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _FOLDER / "built" / f"switchyard_kernels-{digest.hexdigest()[:16]}-{platform.machine().lower()}{_SUFFIX}"


def outdated_libraries() -> list[Path]:
    """Libraries built from other sources: by another version of this program, or for another machine."""
    current = library_path()
    return [path for path in current.parent.glob(f"switchyard_kernels-*{_SUFFIX}") if path != current]


def build() -> Path:
    """Compiles the library unless it exists.

    Raises:
        BuildError: no compiler, or a compile error.
    """
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

    Raises:
        BuildError: a compile error.
    """
    kind = architecture(machine)
    sources = [
        source
        for source in sorted(_SOURCES.glob("*.cpp"))
        if source.name not in _SPECIAL or _SPECIAL[source.name].architecture == kind
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(partial(_compile, compiler, folder=folder, more=more), sources))


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
