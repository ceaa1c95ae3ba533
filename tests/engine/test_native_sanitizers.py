"""The native kernels under the compiler's sanitizers: memory, undefined behaviour and data races."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from engine.kernels.native.build import BuildError, compile_sources, find_compiler
from tests.engine.native_isas import isas

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

_SANITIZERS = {"memory": "address,undefined,float-cast-overflow", "threads": "thread"}
_DRIVER = Path(__file__).parent / "native_sanitizers" / "driver.cpp"
_HEADERS = Path(__file__).parents[2] / "engine" / "kernels" / "native" / "src"
_ISAS = isas()
_ROUNDS = 8


def sanitized_driver(folder: Path, sanitizer: str) -> Path:
    """The driver with all kernels in it; skips the test where the compiler has no such sanitizer."""
    compiler, program = find_compiler(), folder / "driver"
    options = ("-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    link = [compiler.command, "-std=c++17", "-pthread", *options, f"-I{_HEADERS}"]
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n", encoding="utf-8")
    trial = subprocess.run([*link, empty, "-o", program], capture_output=True, text=True, timeout=120, check=False)
    if trial.returncode or subprocess.run([program], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip(f"{compiler.command} makes no program here with -fsanitize={sanitizer}")
    try:
        objects = compile_sources(compiler, folder, options)
    except BuildError as failure:
        pytest.fail(str(failure))
    subprocess.run([*link, _DRIVER, *objects, "-o", program], check=True, timeout=300)
    return program


@pytest.mark.parametrize("sanitizer", _SANITIZERS.values(), ids=_SANITIZERS.keys())
def test_no_sanitizer_reports_anything(sanitizer: str, tmp_path: Path) -> None:
    program = sanitized_driver(tmp_path, sanitizer)
    seed = int.from_bytes(os.urandom(3), "big")
    done = subprocess.run(
        [program, str(seed), str(_ROUNDS), *(str(int(isa)) for isa in _ISAS)],
        env={**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1", "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed} on {platform.machine()}:\n{done.stderr[-4000:]}"
    assert done.stderr == ""
