"""A card for the kernels in CUDA C where there is none: their sources as C++, a block's threads as fibers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import pytest
import torch

from engine.kernels.cuda.compiled import SOURCES, Kernel
from engine.kernels.cuda.groups import CudaGroups
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


_OPTIMISED = {"attention_kernels": "-O0"}
"""There are so many of them that compiling takes longer than what they are asked."""


@cache
def emulator(kernels: str) -> ctypes.CDLL:
    """A library of kernels; what is undefined in C++ ends the process."""
    with TemporaryDirectory() as folder:
        library = Path(folder) / f"{kernels}.so"
        sources = (str(FOLDER / f"{kernels}.cpp"), str(FOLDER / "emulated_card.cpp"))
        checked = ("-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")
        find_compiler().run(
            *OPTIONS, *checked, _OPTIMISED.get(kernels, "-O1"), "-fPIC", "-shared", *sources, "-o", str(library)
        )
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


_LIBRARIES = {"attention.cu": "attention_kernels"}
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
    return CardKernels(products, products.most_visits, CudaGroups(card), CudaUnpacker(card), products)
