"""The kernels for Arm, on an emulated processor, and for AMX, whose tiles are plain arrays here, compared with what
this machine's portable ones give.

Those in turn are held against torch by the other tests.  The vectors beside the tiles are the processor's own: they
need AVX-512 with VNNI and BF16.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.kernels.native.build import BuildError, Compiler, compile_object, compile_sources, find_compiler
from engine.kernels.native.library import Isa
from tests.engine.native_isas import isas
from tests.engine.native_programs import FOLDER, HEADERS, make_program, run_program

_CROSS, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

_COMPILING_S = 1500.0
_SEED = int.from_bytes(os.urandom(3), "big")


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arm")
    compiler = Compiler(_CROSS, within_s=_COMPILING_S)
    return make_program("results", folder, compiler, link=("-static",), machine="aarch64")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> "Results":
    try:
        compiler = find_compiler()
    except BuildError as why:
        pytest.skip(str(why))
    return results(make_program("results", tmp_path_factory.mktemp("here"), compiler), isa=Isa.PORTABLE, seed=_SEED)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (shutil.which(_CROSS) and shutil.which(_EMULATOR)), reason=f"{_CROSS} and {_EMULATOR} are not both here"
)
@pytest.mark.parametrize("isa", [Isa.PORTABLE, Isa.NEON, Isa.NEON_DOT, Isa.NEON_I8MM], ids=lambda isa: isa.name)
def test_every_kernel_gives_what_it_gives_here(on_arm: Path, wanted: "Results", isa: Isa) -> None:
    got = results(_EMULATOR, "-cpu", "max", on_arm, isa=isa, seed=_SEED)
    compare(got, wanted, f"seed {_SEED}", only_numbers=True)  # whether a maximum passes on a NaN is the compiler's


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not (shutil.which(_CROSS) and shutil.which(_EMULATOR)), reason=f"{_CROSS} and {_EMULATOR} are not both here"
)
def test_an_old_processor_is_not_said_to_have_newer_instructions(on_arm: Path) -> None:
    old = [_EMULATOR, "-cpu", "cortex-a53", on_arm, str(_SEED), "1"]
    assert run_program(*old, str(int(Isa.NEON)), timeout_s=300).returncode == 0
    for newer in (Isa.NEON_DOT, Isa.NEON_I8MM):
        refused = run_program(*old, str(int(newer)), timeout_s=300)
        assert refused.returncode != 0
        assert "instructions" in refused.stderr


_ROUNDS = 3
_NEAR_TIES = 0.1
"""Part of all routings that may differ: sums in another order round to another logit, and scores are often close."""

Results = list[tuple[str, np.ndarray]]


def results(*program: str | Path, isa: Isa, seed: int) -> Results:
    """What the program says that the kernels give: numbers, or the experts chosen."""
    done = run_program(*program, str(seed), str(_ROUNDS), str(int(isa)), timeout_s=900)
    assert done.returncode == 0, f"seed {seed}, {isa.name}: {done.stderr}"
    found = []
    for line in done.stdout.splitlines():
        name, _, digits = line.partition(" ")
        halves = np.frombuffer(bytes.fromhex(digits), dtype=">u2").astype(np.uint32)
        found.append((name, halves if name == "chosen" else (halves << 16).view(np.float32)))
    return found


def compare(got: Results, wanted: Results, where: str, *, only_numbers: bool = False) -> None:
    """Fails unless all are near each other, but for routings where experts are as good as each other.

    Args:
        only_numbers: leaves out what infinities and NaNs come of, which sets that round otherwise treat otherwise.
    """
    assert [name for name, _ in got] == [name for name, _ in wanted]
    routings, others = 0, 0
    same_experts = True
    for (name, mine), (_, theirs) in zip(got, wanted, strict=True):
        said = f"{where}, {name}"
        if name == "chosen":
            same_experts = np.array_equal(mine, theirs)
            routings, others = routings + 1, others + (not same_experts)
        elif name == "expanded":
            np.testing.assert_array_equal(mine, theirs, err_msg=said)
        elif only_numbers and not np.isfinite(theirs).all():
            continue
        elif name == "experts_in_blocks":  # one set rounds activations to 8 bits, the other weights to bf16
            assert np.linalg.norm(mine - theirs) <= 0.04 * np.linalg.norm(theirs), said
        elif name != "sparse" or same_experts:
            finite = theirs[np.isfinite(theirs)]
            size = float(np.abs(finite).max()) if finite.size else 0.0
            np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-2 * size + 1e-3, err_msg=said)
    assert others <= _NEAR_TIES * routings


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


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(Isa.AVX512_BF16 not in isas(), reason="this processor has no AVX-512 with BF16")
def test_every_kernel_gives_what_the_portable_ones_give(with_tiles: Path) -> None:
    """Their self-test among them, which holds every type of blocks against its numbers."""
    wanted = results(with_tiles, isa=Isa.PORTABLE, seed=_SEED)
    compare(results(with_tiles, isa=Isa.AMX, seed=_SEED), wanted, f"seed {_SEED}", only_numbers=True)
