"""What a card and the host tell each other during a token: no order of their steps, and no delay, breaks it."""

import os
import sys
from pathlib import Path

import pytest

from engine.kernels.native.build import BuildError, find_compiler
from tests.engine.native_programs import FOLDER, HEADERS, run_program, sanitizing


def _lacks_compiler() -> bool:
    if not sys.platform.startswith("linux"):
        return True  # the scheduler is made of POSIX contexts
    try:
        find_compiler()
    except BuildError:
        return True
    return False


pytestmark = pytest.mark.skipif(_lacks_compiler(), reason="needs a C++ compiler and contexts as on Linux")

FEW_ORDERS, MANY_ORDERS = 300, 10_000
FEW_STEPS, MANY_STEPS = 5_000, 10_000_000


def _program(folder: Path, name: str, options: tuple[str, ...]) -> Path:
    program = folder / name
    sources = (str(FOLDER / f"{name}.cpp"), str(HEADERS / "thread_pool.cpp"))
    warnings = ("-Wall", "-Wextra", "-Werror")
    find_compiler().run("-std=c++17", "-pthread", *warnings, *options, f"-I{HEADERS}", *sources, "-o", str(program))
    return program


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _program(tmp_path_factory.mktemp("orders"), "exchange_orders", ("-O1", "-g"))


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("races")
    return _program(folder, "exchange_races", sanitizing(folder, "thread"))


def _check(program: Path, count: int, timeout_s: float) -> None:
    seed = int.from_bytes(os.urandom(3), "big")
    done = run_program(program, str(seed), str(count), timeout_s=timeout_s, TSAN_OPTIONS="halt_on_error=1")
    assert done.returncode == 0, f"seed {seed}:\n{done.stderr[-4000:]}"
    assert done.stderr == ""


def test_no_order_of_steps_breaks_it(orders: Path) -> None:
    """No flag is lost, no slot is read while it is overwritten, no expert is mistaken for another."""
    _check(orders, FEW_ORDERS, 120)


@pytest.mark.parametrize("mistake", ["1", "2", "3"])
def test_a_mistake_would_be_seen(orders: Path, mistake: str) -> None:
    """Slots overwritten or named too early, answers announced too early."""
    done = run_program(orders, "1", str(FEW_ORDERS), mistake, timeout_s=120)
    assert done.returncode == 1
    assert ("a slot holds another expert" if mistake != "3" else "a wrong answer") in done.stderr


def test_no_data_race_with_random_delays(races: Path) -> None:
    _check(races, FEW_STEPS, 120)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_no_order_of_many_breaks_it(orders: Path) -> None:
    _check(orders, MANY_ORDERS, 600)


@pytest.mark.exhaustive
@pytest.mark.timeout(9000)
def test_no_data_race_in_many_steps(races: Path) -> None:
    """Ten minutes on two idle cores, up to 41 beside other work."""
    _check(races, MANY_STEPS, 8400)
