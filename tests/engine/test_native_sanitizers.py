"""The native kernels under the compiler's sanitizers: memory, undefined behaviour and data races."""

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from engine.kernels.native.build import find_compiler
from engine.kernels.native.library import Isa
from tests.engine.native_isas import isas
from tests.engine.native_programs import FOLDER, HEADERS, make_program, run_program, sanitizing

_MEMORY, _THREADS = "address,undefined,float-cast-overflow", "thread"
_ISAS = isas()
_SETS = [*((isa,) for isa in _ISAS), *([tuple(_ISAS)] if len(_ISAS) > 1 else [])]
"""Each set of instructions alone, and all of them beside each other."""
_ROUNDS = 8
_COMPILING_S = 1200
"""A source with checks in it, beside whatever else the machine does."""


@pytest.fixture(scope="module")
def driver_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The driver with all kernels in it, made once for each sanitizer; skips tests where the compiler lacks it."""

    @cache
    def make(sanitizer: str) -> Path:
        folder = tmp_path_factory.mktemp("sanitized")
        options = sanitizing(folder, sanitizer, "-fno-omit-frame-pointer")
        return make_program("driver", folder, replace(find_compiler(), within_s=_COMPILING_S), options)

    return make


@pytest.mark.parametrize("program", ["driver", "results"])
def test_the_programs_know_the_kernels_interface(program: str) -> None:
    """Whoever changes the interface is not left to find out from the tests that run only when asked for."""
    find_compiler().run("-std=c++17", "-fsyntax-only", f"-I{HEADERS}", str(FOLDER / f"{program}.cpp"))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sets", _SETS, ids=lambda sets: "-".join(isa.name.lower() for isa in sets))
@pytest.mark.parametrize("sanitizer", [_MEMORY, _THREADS], ids=["memory", "races"])
def test_no_sanitizer_reports_anything(
    sanitizer: str, sets: tuple[Isa, ...], driver_with: Callable[[str], Path]
) -> None:
    """The driver runs to its end with a random seed."""
    seed = int.from_bytes(os.urandom(3), "big")
    done = run_program(
        *(driver_with(sanitizer), str(seed), str(_ROUNDS), *(str(int(isa)) for isa in sets)),
        timeout_s=1800,
        ASAN_OPTIONS="detect_stack_use_after_return=1",
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert done.returncode == 0, f"seed {seed} on {platform.machine()}:\n{done.stderr[-4000:]}"
    assert done.stderr == ""
