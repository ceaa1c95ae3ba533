"""C++ programs made of the native kernels and a source of `native_sanitizers`."""

import os
import subprocess
from pathlib import Path

import pytest

from engine.kernels.native.build import Compiler, compile_sources, find_compiler

FOLDER = Path(__file__).parent / "native_sanitizers"
HEADERS = Path(__file__).parents[2] / "engine" / "kernels" / "native" / "src"


def make_program(
    name: str,
    folder: Path,
    compiler: Compiler,
    options: tuple[str, ...] = (),
    *,
    link: tuple[str, ...] = (),
    machine: str | None = None,
) -> Path:
    """The program of this name, compiled in `folder`.

    Raises:
        BuildError: the compiler refuses a source.
    """
    objects = compile_sources(compiler, folder, options, machine)
    program = folder / name
    sources = [str(FOLDER / f"{name}.cpp"), *map(str, objects)]
    compiler.run("-std=c++17", "-pthread", *options, *link, f"-I{HEADERS}", *sources, "-o", str(program))
    return program


def run_program(*command: str | Path, timeout_s: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """What came of it; the environment is `environment` besides this process'."""
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def sanitizing(folder: Path, sanitizer: str, *more: str) -> tuple[str, ...]:
    """The compiler's options for a sanitizer; skips the test where programs made with them do not run."""
    compiler, program = find_compiler(), folder / "trial"
    checked = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", *more)
    # Lines suffice for a report, and functions with checks grow beyond what GCC inlines in an acceptable time.
    options = ("-O1", "-g1", "-fno-inline-functions-called-once", *checked)
    empty = folder / "empty.cpp"
    empty.write_text("int main() { return 0; }\n", encoding="utf-8")
    command = [compiler.command, *options, empty, "-o", program]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if made.returncode or run_program(program, timeout_s=60).returncode:
        pytest.skip(f"{compiler.command} makes no program here with -fsanitize={sanitizer}")
    return options
