"""The kernels for Arm, run on an emulated processor and compared with what this machine's portable ones give.

Those in turn are held against torch by the other tests.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.kernels.native.build import BuildError, Compiler, find_compiler
from engine.kernels.native.library import Isa
from tests.engine.native_programs import make_program, run_program

_CROSS, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which(_CROSS) and shutil.which(_EMULATOR)), reason=f"{_CROSS} and {_EMULATOR} are not both here"
    ),
]
_ROUNDS = 3
_SEED = int.from_bytes(os.urandom(3), "big")
_NEAR_TIES = 0.1
"""Part of all routings that may differ: sums in another order round to another logit, and scores are often close."""

Results = list[tuple[str, np.ndarray]]


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    return make_program("results", folder, Compiler(_CROSS), link=("-static",), machine="aarch64")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Results:
    try:
        compiler = find_compiler()
    except BuildError as why:
        pytest.skip(str(why))
    return results(make_program("results", tmp_path_factory.mktemp("here"), compiler), isa=Isa.PORTABLE)


def results(*program: str | Path, isa: Isa) -> Results:
    """What the program says that the kernels give: numbers, or the experts chosen."""
    done = run_program(*program, str(_SEED), str(_ROUNDS), str(int(isa)), timeout_s=300)
    assert done.returncode == 0, f"seed {_SEED}, {isa.name}: {done.stderr}"
    found = []
    for line in done.stdout.splitlines():
        name, _, digits = line.partition(" ")
        halves = np.frombuffer(bytes.fromhex(digits), dtype=">u2").astype(np.uint32)
        found.append((name, halves if name == "chosen" else (halves << 16).view(np.float32)))
    return found


@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.NEON, Isa.NEON_DOT], ids=lambda isa: isa.name)
def test_every_kernel_gives_what_it_gives_here(on_arm: Path, wanted: Results, isa: Isa) -> None:
    got = results(_EMULATOR, on_arm, isa=isa)
    assert [name for name, _ in got] == [name for name, _ in wanted]
    routings, others = 0, 0
    same_experts = True
    for (name, mine), (_, theirs) in zip(got, wanted, strict=True):
        where = f"seed {_SEED}, {name}"
        if name == "chosen":
            same_experts = np.array_equal(mine, theirs)
            routings, others = routings + 1, others + (not same_experts)
        elif name == "expanded":
            np.testing.assert_array_equal(mine, theirs, err_msg=where)
        elif name != "sparse" or same_experts:
            finite = theirs[np.isfinite(theirs)]
            size = float(np.abs(finite).max()) if finite.size else 0.0
            np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-2 * size + 1e-3, err_msg=where)
    assert others <= _NEAR_TIES * routings


def test_an_old_processor_is_not_said_to_have_dot_products(on_arm: Path) -> None:
    old = [_EMULATOR, "-cpu", "cortex-a53", on_arm, str(_SEED), "1"]
    assert run_program(*old, str(int(Isa.NEON)), timeout_s=300).returncode == 0
    refused = run_program(*old, str(int(Isa.NEON_DOT)), timeout_s=300)
    assert refused.returncode != 0
    assert "instructions" in refused.stderr
