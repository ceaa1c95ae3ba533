"""The kernels in CUDA C under the sanitizers: memory, undefined behaviour and races between the threads of a block.

Random cases, whose buffers are of exactly their sizes, are compared with plain loops.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.kernels.native.build import find_compiler
from tests.engine.emulated_cuda_card import FOLDER, OPTIONS, needs_compiler
from tests.engine.native_programs import run_program, sanitizing

pytestmark = needs_compiler


def sanitized(folder: Path, sanitizer: str, *more: str) -> Path:
    """The driver with a sanitizer; skips the test where the compiler has no such sanitizer."""
    program = folder / "driver"
    options = sanitizing(folder, sanitizer, *more)
    sources = (str(FOLDER / "driver.cpp"), str(FOLDER / "emulated_card.cpp"))
    find_compiler().run(*OPTIONS, *options, *sources, "-o", str(program))
    return program


def assert_clean(program: Path, cases: int) -> None:
    seed = int.from_bytes(os.urandom(3), "big")
    done = run_program(program, str(seed), str(cases), timeout_s=600, TSAN_OPTIONS="halt_on_error=1")
    assert done.returncode == 0, f"seed {seed}:\n{done.stderr[-4000:]}"
    assert done.stderr == ""


def test_the_driver_knows_the_kernels() -> None:
    """Whoever changes a kernel's arguments is not left to find out from the tests that run only when asked for."""
    find_compiler().run(*OPTIONS, "-fsyntax-only", str(FOLDER / "driver.cpp"))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_no_wrong_access_and_nothing_undefined(tmp_path: Path) -> None:
    assert_clean(sanitized(tmp_path, "address,undefined,float-cast-overflow"), 300)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_no_data_race(tmp_path: Path) -> None:
    """A block's threads are threads of this machine."""
    assert_clean(sanitized(tmp_path, "thread", "-DEMULATED_THREADS"), 25)
