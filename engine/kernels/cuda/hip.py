"""The same kernels on AMD's cards: compiled by hiprtc and started through HIP, both as PyTorch's ROCm builds have them.

Their interfaces are NVRTC's and the driver's with other names; what the sources need besides is in `src/hip.h`.  None
of this has run on a card.  As on NVIDIA's, each kernel is tried before it is used.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from engine.kernels.cuda.card import Card
from engine.kernels.cuda.compiled import Kernel, kept_code, sources_of
from engine.kernels.cuda.launcher import DriverError
from engine.kernels.cuda.nvrtc import CompileError, Machine, RunTimeCompiler, Usage

_FOLDERS = ("torch/lib", "_rocm_sdk_core/lib", "_rocm_sdk_core/bin")
"""Within site-packages: of PyTorch's wheels, and of the packages that newer ones need."""
_SYSTEM = ("/opt/rocm/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu")
_COMPILERS = ("hiprtc0*.dll", "hiprtc.dll") if sys.platform == "win32" else ("libhiprtc.so*", "libhiprtc-*.so*")
_DRIVERS = ("amdhip64*.dll",) if sys.platform == "win32" else ("libamdhip64.so*", "libamdhip64-*.so*")
_OPTIONS = ("-std=c++17", "-O3")
MISSING = (
    "AMD's compiler hiprtc was not found: it comes with PyTorch's ROCm builds, so run the set-up again, or install ROCm"
)


class Hiprtc(RunTimeCompiler):
    """AMD's; its version is its own."""

    name, _prefix, _code = "hiprtc", "hiprtc", "Code"


def _libraries(patterns: Sequence[str]) -> Iterator[Path]:
    """Files of these names, those beside the installed PyTorch first."""
    places = [*map(Path, filter(None, sys.path))]
    found = importlib.util.find_spec("torch")
    if found is not None and found.origin is not None:
        places.insert(0, Path(found.origin).parent.parent)
    folders = [place / folder for place in places for folder in _FOLDERS]
    if sys.platform == "linux":
        folders += map(Path, _SYSTEM)
    for folder in dict.fromkeys(folders):
        for pattern in patterns:
            yield from (path for path in sorted(folder.glob(pattern)) if "builtins" not in path.name)


@cache
def find_hiprtc() -> Hiprtc:
    """The compiler.

    Raises:
        CompileError: there is none.
    """
    refused = ""
    for path in _libraries((*_COMPILERS, *_DRIVERS)):  # older drivers are the compiler, too
        try:
            return Hiprtc(path)
        except (OSError, AttributeError) as error:
            refused = f"AMD's compiler {path} could not be loaded ({error})"
    raise CompileError(refused or MISSING)


def compile_for(kernel: Kernel, architecture: str, hiprtc: Hiprtc) -> Machine:
    """Machine code for cards of an architecture, such as gfx1100.

    Raises:
        CompileError: the compiler refuses it.
    """
    source, headers, defines = sources_of(kernel)
    options = (*_OPTIONS, f"--offload-arch={architecture}", *defines)
    return hiprtc.compile(source, kernel.source, headers, options)


def usage_of(code: bytes) -> Usage:
    """What a kernel takes of a card, by the notes in its machine code: vector registers, shared memory, and scratch.

    Raises:
        ValueError: it has no such notes.
    """
    numbers = [_noted(code, name) for name in ("vgpr_count", "group_segment_fixed_size", "private_segment_fixed_size")]
    return Usage(*numbers)


def _noted(code: bytes, name: str) -> int:
    """A number of the notes, which are MessagePack."""
    key = f".{name}".encode()
    at = code.find(bytes([0xA0 + len(key)]) + key)
    if at < 0:
        raise ValueError(f"no {name} in the code")
    at += 1 + len(key)
    width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(code[at], 0)
    return int.from_bytes(code[at + 1 : at + 1 + width], "big") if width else code[at]


@cache
def _driver() -> ctypes.CDLL:
    refused = "it was not found"
    for path in _libraries(_DRIVERS):
        try:
            library = AmdCard._bound(ctypes.CDLL(str(path)))
        except OSError as error:
            refused = str(error)
            continue
        library.hipGetErrorString.restype = ctypes.c_char_p
        return library
    raise DriverError(f"AMD's HIP could not be loaded ({refused})")


class AmdCard(Card):
    """One of AMD's; the version of its driver is HIP's.

    Attributes:
        architecture: such as gfx1100.
    """

    _prefix, _launching, _telling = "hip", "hipModuleLaunchKernel", "hipRuntimeGetVersion"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.architecture = str(self._properties.gcnArchName).partition(":")[0]

    def _library(self) -> ctypes.CDLL:
        return _driver()

    def _checked(self, result: int, did: str) -> None:
        if result:
            words = _driver().hipGetErrorString(result) or f"error {result}".encode()
            raise DriverError(f"HIP could not {did}: {words.decode(errors='replace')}")

    def _code(self, kernel: Kernel, *, again: bool = False) -> bytes:
        compiler, target = find_hiprtc(), self.architecture
        made_from = repr((kernel, _OPTIONS, compiler.version, target, self.driver))
        return kept_code(kernel, target, made_from, lambda: compile_for(kernel, target, compiler).code, again=again)
