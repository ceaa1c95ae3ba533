"""A card for the kernels in CUDA C where there is none: their sources as C++, a block's threads as fibers."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import pytest
import torch

from engine.formats.ggml import GRIDS
from engine.kernels.cuda.compiled import SOURCES, Kernel
from engine.kernels.cuda.products import CudaGroups, CudaProducts, CudaUnpacker
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.native.build import BuildError, find_compiler
from tests.engine.native_programs import HEADERS
from tests.starter import CACHE

FOLDER = Path(__file__).parent / "emulated_cuda"
OPTIONS = (
    *("-std=c++17", "-pthread", "-DSWITCHYARD_EMULATED"),
    *(f"-I{each}" for each in (FOLDER, SOURCES, GRIDS.parent, HEADERS)),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered", "-fno-strict-aliasing"),
    "-Wno-stringop-overflow",  # with a sanitizer's checks in it, GCC believes in lengths that no loop reaches
)


def _lacks_compiler() -> bool:
    if sys.platform == "win32":
        return True  # fibers are POSIX's
    try:
        find_compiler()
    except BuildError:
        return True
    return False


needs_compiler = pytest.mark.skipif(_lacks_compiler(), reason="needs a C++ compiler and fibers as on Linux")
_turn = Lock()
"""The emulated card's blocks are no other thread's."""


_OPTIMISED = {"attention_kernels": "-O0", "latent_kernels": "-O0"}
"""Of these, compiling takes longer than what they are asked."""
_FORMATS = {
    "PRODUCTS": ("Int8", "Int4", "Lut4", "PlainBf16", "PlainFp16", "PlainFp32"),
    "GROUPS": ("Int8", "Int4", "Lut4"),
}
IN_BLOCKS = re.findall(r"DO\((\w+)\)", (FOLDER / "kernels.h").read_text(encoding="utf-8"))
"""Types of blocks that are multiplied; the others are only unpacked."""
_OF_LATENTS = {"EXPANSIONS": _FORMATS["PRODUCTS"], "LATENTS": ("KvBf16", "KvFp16", "KvFp32")}
_UNITS = {
    "kernels": [
        *(f"{kind}({name})" for kind, names in _FORMATS.items() for name in names),
        *(f"{kind}(Blocks<{name}>)" for kind in _FORMATS for name in IN_BLOCKS),
        *(f"{kind}(MixedBlocks)" for kind in _FORMATS),
    ],
    "attention_kernels": [
        f"HEADS({kv}, {width})" for kv in ("KvBf16", "KvFp16", "KvFp32", "KvInt8") for width in (64, 128, 256)
    ],
    "latent_kernels": [f"{kind}({name})" for kind, names in _OF_LATENTS.items() for name in names],
}
"""What takes longest to compile, by the header that declares it."""
_KEPT_DAYS = 7


def compiled(
    options: Sequence[str], sources: Sequence[str], headers: Sequence[str] = tuple(_UNITS), within_s: float = 300
) -> list[str]:
    """Object files of these sources and of all kernels that these headers declare, several compiled at a time.

    They are kept in `.cache`, by all that they are made from, until they have not been asked for in a week.

    Raises:
        BuildError: the compiler refuses one.
    """
    compiler = replace(find_compiler(), within_s=within_s)
    made_from = hashlib.sha256(repr((compiler.command, compiler_version(compiler.command), options)).encode())
    ours = sorted(path for folder in (FOLDER, SOURCES) for path in folder.iterdir() if path.is_file())
    for path in (*ours, GRIDS):
        made_from.update(path.name.encode() + b"\0" + path.read_bytes())
    kept = CACHE / "emulated_cuda"
    place = kept / made_from.hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n", encoding="utf-8")
    os.utime(place)
    for old in kept.iterdir():
        if old.stat().st_mtime < place.stat().st_mtime - _KEPT_DAYS * 86400:
            shutil.rmtree(old, ignore_errors=True)

    def make(name: str, source: str, *defines: str) -> str:
        made = place / f"{re.sub(r'[^0-9A-Za-z]+', '-', name)}.o"
        if not made.exists():
            with TemporaryDirectory(dir=place) as scratch:
                new = Path(scratch) / made.name
                compiler.run(*OPTIONS, *options, *defines, "-c", str(FOLDER / source), "-o", str(new))
                new.replace(made)  # whole or not at all: others may be compiling the same
        return str(made)

    units = [(unit, header) for header in headers for unit in _UNITS[header]]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        ours = [pool.submit(make, source, source) for source in sources]
        theirs = [
            pool.submit(make, unit, "unit.cpp", f'-DEMULATED_HEADER="{header}.h"', f"-DEMULATED_UNIT={unit}")
            for unit, header in units
        ]
        return [each.result() for each in (*ours, *theirs)]


def compiler_version(command: str) -> str:
    """What it says of itself."""
    return subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout


@cache
def emulator(kernels: str) -> ctypes.CDLL:
    """A library of kernels; what is undefined in C++ ends the process."""
    checked = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")
    options = (*checked, _OPTIMISED.get(kernels, "-O1"), "-fPIC")
    objects = compiled(options, (f"{kernels}.cpp", "emulated_card.cpp"), (kernels,))
    with TemporaryDirectory() as folder:
        library = Path(folder) / f"{kernels}.so"
        find_compiler().run(*checked, "-pthread", "-shared", *objects, "-o", str(library))
        return ctypes.CDLL(str(library))


class EmulatedCudaCard:
    """`engine.kernels.cuda.driver.Launcher` on the CPU; blocks run in an order of their own.

    A launch is an operator of PyTorch's, so that graphs of the emulated device repeat it.

    Attributes:
        launched: the kernels and their grids so far.
    """

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors
        self.launched: list[tuple[Kernel, tuple[int, int, int]]] = []

    @property
    def multiprocessors(self) -> int:
        return self._multiprocessors

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        self.launched.append((kernel, grid))
        _kernels.setdefault(kernel, len(_kernels))
        copied = torch.frombuffer(bytearray(arguments), dtype=torch.uint8)
        torch.ops.switchyard_tests.launch(copied, _kernels[kernel], grid, len(self.launched))

    def address_of(self, memory: torch.Tensor) -> int:
        return memory.data_ptr()


_LIBRARIES = {
    "attention.cu": "attention_kernels",
    **dict.fromkeys(("latent_queries.cu", "latent_attention.cu", "latent_values.cu"), "latent_kernels"),
}
_kernels: dict[Kernel, int] = {}
_library = torch.library.Library("switchyard_tests", "DEF")
_library.define("launch(Tensor arguments, int kernel, int[] grid, int seed) -> ()")


def _launch(arguments: torch.Tensor, number: int, grid: Sequence[int], seed: int) -> None:
    kernel = list(_kernels)[number]
    values = [value for _, value in kernel.defines]
    names = (ctypes.c_char_p * len(values))(*(value.encode() for value in values))
    size = (ctypes.c_uint * 3)(*grid)
    at = ctypes.c_void_p(arguments.data_ptr())
    with _turn:
        library = emulator(_LIBRARIES.get(kernel.source, "kernels"))
        found = library.emulate(kernel.entry.encode(), names, size, ctypes.c_uint64(seed), at)
    assert found == 0, f"the emulator has no {kernel}"


_library.impl("launch", _launch, "CompositeExplicitAutograd")


def emulated_kernels(multiprocessors: int = 16) -> CardKernels:
    """The kernels in CUDA C as a card with so many multiprocessors would run them."""
    card = EmulatedCudaCard(multiprocessors)
    products = CudaProducts(card)
    return CardKernels(products, products.most_visits, CudaGroups(card), CudaUnpacker(card))
