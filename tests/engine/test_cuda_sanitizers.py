"""The kernels in CUDA C under the sanitizers: memory, undefined behaviour and races between the threads of a block.

Random cases, whose buffers are of exactly their sizes, are compared with plain loops.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from engine.kernels.native.build import find_compiler
from tests.engine.emulated_cuda_card import FOLDER, OPTIONS, compiled, needs_compiler
from tests.engine.native_programs import FOLDER as NATIVE_FOLDER
from tests.engine.native_programs import HEADERS, run_program, sanitizing

pytestmark = needs_compiler


_COMPILING_S = 1200
"""A source with checks in it, beside whatever else the machine does."""


def every_kernel(folder: Path, sanitizer: str, *more: str) -> Path:
    """The driver of all kernels with a sanitizer; skips the test where the compiler has no such sanitizer."""
    program, options = folder / "driver", sanitizing(folder, sanitizer, *more)
    objects = compiled(
        options, ("driver.cpp", "emulated_card.cpp", str(HEADERS / "rows_portable.cpp")), within_s=_COMPILING_S
    )
    find_compiler().run("-pthread", *options, *objects, "-o", str(program))
    return program


def the_exchange(folder: Path, sanitizer: str, *more: str) -> Path:
    """The same of what a card and the host tell each other, with the real host side."""
    program, options = folder / "exchange_driver", sanitizing(folder, sanitizer, *more)
    sources = (FOLDER / "exchange_driver.cpp", FOLDER / "emulated_card.cpp", HEADERS / "thread_pool.cpp")
    compiler = replace(find_compiler(), within_s=_COMPILING_S)
    headers = (f"-I{HEADERS}", f"-I{NATIVE_FOLDER}")
    compiler.run(*OPTIONS, *options, *headers, *map(str, sources), "-o", str(program))
    return program


def assert_clean(program: Path, cases: int, *more: str) -> None:
    seed = int.from_bytes(os.urandom(3), "big")
    done = run_program(program, str(seed), str(cases), *more, timeout_s=1800, TSAN_OPTIONS="halt_on_error=1")
    assert done.returncode == 0, f"seed {seed}:\n{done.stderr[-4000:]}"
    assert done.stderr == ""


def test_the_driver_knows_the_kernels() -> None:
    """Whoever changes a kernel's arguments is not left to find out from the tests that run only when asked for."""
    find_compiler().run(*OPTIONS, "-fsyntax-only", str(FOLDER / "driver.cpp"))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_wrong_access_and_nothing_undefined(tmp_path: Path) -> None:
    assert_clean(every_kernel(tmp_path, "address,undefined,float-cast-overflow"), 300)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_no_data_race(tmp_path: Path) -> None:
    """A block's threads are threads of this machine."""
    assert_clean(every_kernel(tmp_path, "thread", "-DEMULATED_THREADS"), 25)


_WHOLE_BLOCK, _ONE = "32", "1"
"""Threads of a block: checkers for races know one of them, or threads of this machine."""


def test_tokens_of_a_card_beside_the_host_have_the_same_bits(tmp_path: Path) -> None:
    """Every token that is not given up, with random slots, changes, delays, cancels and late answers."""
    assert_clean(the_exchange(tmp_path, "thread"), 2_000, _ONE)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sanitizer", "more", "steps", "threads"),
    [
        ("thread", (), 1_000_000, _ONE),
        ("thread", ("-DEMULATED_THREADS",), 500, _WHOLE_BLOCK),
        ("address,undefined,float-cast-overflow", (), 60_000, _WHOLE_BLOCK),
    ],
)
def test_many_tokens_of_a_card(sanitizer: str, more: tuple[str, ...], steps: int, threads: str, tmp_path: Path) -> None:
    assert_clean(the_exchange(tmp_path, sanitizer, *more), steps, threads)
