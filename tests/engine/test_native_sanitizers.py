"""The native kernels under the compiler's sanitizers: memory, undefined behaviour and data races."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from engine.kernels.native.build import find_compiler
from engine.kernels.native.library import Isa
from tests.engine.native_isas import isas
from tests.engine.native_programs import FOLDER, HEADERS, make_program, run_program, sanitizing

_MEMORY, _THREADS = "address,undefined,float-cast-overflow", "thread"
_ISAS = isas()
_ROUNDS = 8
_COMPILING_S = 1200
"""A source with checks in it, beside whatever else the machine does."""


def sanitized_driver(folder: Path, sanitizer: str) -> Path:
    """The driver with all kernels in it; skips the test where the compiler has no such sanitizer."""
    options = sanitizing(folder, sanitizer, "-fno-omit-frame-pointer")
    return make_program("driver", folder, replace(find_compiler(), within_s=_COMPILING_S), options)


@pytest.mark.parametrize("program", ["driver", "results"])
def test_the_programs_know_the_kernels_interface(program: str) -> None:
    """Whoever changes the interface is not left to find out from the tests that run only when asked for."""
    find_compiler().run("-std=c++17", "-fsyntax-only", f"-I{HEADERS}", str(FOLDER / f"{program}.cpp"))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_wrong_access_and_nothing_undefined(tmp_path: Path) -> None:
    assert_clean(sanitized_driver(tmp_path, _MEMORY), *_ISAS)


@pytest.fixture(scope="module")
def watched_for_races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sanitized_driver(tmp_path_factory.mktemp("threads"), _THREADS)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name.lower())
def test_no_data_race(isa: Isa, watched_for_races: Path) -> None:
    assert_clean(watched_for_races, isa)


def assert_clean(program: Path, *chosen: Isa) -> None:
    """The driver runs to its end with a random seed, and no sanitizer reports anything."""
    seed = int.from_bytes(os.urandom(3), "big")
    done = run_program(
        *(program, str(seed), str(_ROUNDS), *(str(int(isa)) for isa in chosen)),
        timeout_s=1800,
        ASAN_OPTIONS="detect_stack_use_after_return=1",
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert done.returncode == 0, f"seed {seed} on {platform.machine()}:\n{done.stderr[-4000:]}"
    assert done.stderr == ""
