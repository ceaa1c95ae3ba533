"""The kernels for Arm, run on an emulated processor and compared with what this machine's portable ones give.

Those in turn are held against torch by the other tests.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.kernels.native.build import BuildError, Compiler, find_compiler
from engine.kernels.native.library import Isa
from tests.engine.compared_results import Results, compare, results
from tests.engine.native_programs import make_program, run_program

_CROSS, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (shutil.which(_CROSS) and shutil.which(_EMULATOR)), reason=f"{_CROSS} and {_EMULATOR} are not both here"
    ),
]
_COMPILING_S = 1500.0
_SEED = int.from_bytes(os.urandom(3), "big")


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    compiler = Compiler(_CROSS, within_s=_COMPILING_S)
    return make_program("results", folder, compiler, link=("-static",), machine="aarch64")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Results:
    try:
        compiler = find_compiler()
    except BuildError as why:
        pytest.skip(str(why))
    return results(make_program("results", tmp_path_factory.mktemp("here"), compiler), isa=Isa.PORTABLE, seed=_SEED)


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.NEON, Isa.NEON_DOT, Isa.NEON_I8MM], ids=lambda isa: isa.name)
def test_every_kernel_gives_what_it_gives_here(on_arm: Path, wanted: Results, isa: Isa) -> None:
    got = results(_EMULATOR, "-cpu", "max", on_arm, isa=isa, seed=_SEED)
    compare(got, wanted, f"seed {_SEED}", only_numbers=True)  # whether a maximum passes on a NaN is the compiler's


def test_an_old_processor_is_not_said_to_have_newer_instructions(on_arm: Path) -> None:
    old = [_EMULATOR, "-cpu", "cortex-a53", on_arm, str(_SEED), "1"]
    assert run_program(*old, str(int(Isa.NEON)), timeout_s=300).returncode == 0
    for newer in (Isa.NEON_DOT, Isa.NEON_I8MM):
        refused = run_program(*old, str(int(newer)), timeout_s=300)
        assert refused.returncode != 0
        assert "instructions" in refused.stderr
