"""The kernels for AMX, whose tiles are plain arrays here, compared with what the portable kernels give.

The vectors beside the tiles are the processor's own: it needs AVX-512 with VNNI and BF16.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.kernels.native.build import compile_object, compile_sources, find_compiler
from engine.kernels.native.library import Isa
from tests.engine.compared_results import compare, results
from tests.engine.native_isas import isas
from tests.engine.native_programs import FOLDER, HEADERS

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(Isa.AVX512_BF16 not in isas(), reason="this processor has no AVX-512 with BF16"),
]
_SEED = int.from_bytes(os.urandom(3), "big")


@pytest.fixture(scope="module")
def with_tiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, compiler = tmp_path_factory.mktemp("amx"), find_compiler()
    compile_sources(compiler, folder)
    compile_object(compiler, "many_amx.cpp", folder, ("-include", str(FOLDER / "emulated_tiles.h")))
    (folder / "processor.o").unlink()
    program = folder / "results"
    sources = [str(FOLDER / name) for name in ("results.cpp", "emulated_processor.cpp")]
    objects = map(str, folder.glob("*.o"))
    compiler.run("-std=c++17", "-pthread", f"-I{HEADERS}", *sources, *objects, "-o", str(program))
    return program


def test_every_kernel_gives_what_the_portable_ones_give(with_tiles: Path) -> None:
    """Their self-test among them, which holds every type of blocks against its numbers."""
    wanted = results(with_tiles, isa=Isa.PORTABLE, seed=_SEED)
    compare(results(with_tiles, isa=Isa.AMX, seed=_SEED), wanted, f"seed {_SEED}", only_numbers=True)
