"""The native kernels, once for every instruction set that works here."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.kernels.native import build
from engine.kernels.native.library import Isa, NativeKernels, load_kernels, proven


def isas() -> list[Isa]:
    """Those that work, after building; skips the calling module where there is no compiler."""
    try:
        return proven(build.build())
    except build.BuildError as why:
        pytest.skip(f"the native kernels cannot be built here: {why}", allow_module_level=True)


@contextmanager
def kernels_of(isa: Isa, threads: int) -> Iterator[NativeKernels]:
    """The kernels of this instruction set; the best ones are back in use afterwards."""
    best = load_kernels(threads=1)
    held_back = NativeKernels(best._library, isa, threads)
    try:
        yield held_back
    finally:
        held_back.close()
        NativeKernels(best._library, best.isa, threads=1).close()
        best.close()
