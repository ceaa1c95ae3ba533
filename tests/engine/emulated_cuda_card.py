"""A card for the kernels in CUDA C where there is none: their sources as C++, a block's threads as fibers."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import pytest

from engine.kernels.cuda.compiled import SOURCES, Kernel
from engine.kernels.cuda.products import CudaProducts
from engine.kernels.cuda.unpack import CudaUnpacker
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.native.build import BuildError, find_compiler

FOLDER = Path(__file__).parent / "emulated_cuda"
OPTIONS = (
    *("-std=c++17", "-pthread", "-DSWITCHYARD_EMULATED", f"-I{FOLDER}", f"-I{SOURCES}"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-clobbered", "-fno-strict-aliasing"),
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


@cache
def emulator() -> ctypes.CDLL:
    """The library with all kernels; what is undefined in C++ ends the process."""
    with TemporaryDirectory() as folder:
        library = Path(folder) / "emulated.so"
        sources = (str(FOLDER / "kernels.cpp"), str(FOLDER / "emulated_card.cpp"))
        checked = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")
        find_compiler().run(*OPTIONS, *checked, "-O1", "-fPIC", "-shared", *sources, "-o", str(library))
        return ctypes.CDLL(str(library))


class EmulatedCudaCard:
    """`engine.kernels.cuda.driver.Launcher` on the CPU; blocks run in an order of their own.

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
        values = [value for _, value in kernel.defines]
        names = (ctypes.c_char_p * len(values))(*(value.encode() for value in values))
        seed = ctypes.c_uint64(len(self.launched))
        size = (ctypes.c_uint * 3)(*grid)
        with _turn:
            found = emulator().emulate(kernel.entry.encode(), names, size, seed, ctypes.byref(arguments))
        assert found == 0, f"the emulator has no {kernel}"


def emulated_kernels(multiprocessors: int = 16) -> CardKernels:
    """The kernels in CUDA C as a card with so many multiprocessors would run them."""
    card = EmulatedCudaCard(multiprocessors)
    products = CudaProducts(card)
    return CardKernels(products, products.most_visits, None, CudaUnpacker(card))
