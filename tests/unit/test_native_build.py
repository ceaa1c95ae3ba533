"""What each compiler is told for each kind of processor; nothing is compiled here."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.kernels.native import build
from engine.kernels.native.build import compile_sources
from engine.kernels.native.compilers import BuildError, Compiler, architecture, parse_variables


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """What compilers are told, by the name of the source."""
    calls: dict[str, tuple[str, ...]] = {}

    def note(_: Compiler, *arguments: str) -> None:
        calls[next(Path(word).name for word in arguments if word.endswith(".cpp"))] = arguments

    monkeypatch.setattr(Compiler, "run", note)
    return calls


@pytest.mark.parametrize(
    ("machine", "kind"),
    [("x86_64", "x86"), ("AMD64", "x86"), ("aarch64", "arm"), ("arm64", "arm"), ("ARM64", "arm"), ("riscv64", "other")],
)
def test_processors_are_known_by_all_their_names(machine: str, kind: str) -> None:
    assert architecture(machine) == kind


def test_each_processor_gets_its_own_kernels(told: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    compile_sources(Compiler("g++", for_windows=False), tmp_path, machine="arm64")
    assert "-march=armv8.2-a+dotprod" in told["tiles_neondot.cpp"]
    assert not any("avx" in name for name in told)
    assert not any(word.startswith("-mavx") for words in told.values() for word in words)
    told.clear()
    compile_sources(Compiler("g++", for_windows=False), tmp_path, machine="x86_64")
    assert "-mavx2" in told["tiles_avx2.cpp"]
    assert "-mavx2" not in told["tiles_portable.cpp"]
    assert not any("neon" in name for name in told)
    told.clear()
    compile_sources(Compiler("g++", for_windows=False), tmp_path, machine="riscv64")
    assert not any("neon" in name or "avx" in name for name in told)


def test_clang_is_told_microsofts_way_on_windows(told: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    compile_sources(Compiler(r"C:\VS\bin\clang-cl.exe", for_windows=True), tmp_path, machine="AMD64")
    words = told["tiles_avxvnni.cpp"]
    assert {"/c", "/clang:-std=c++17", "/clang:-mavx2", "/clang:-mavxvnni"} <= set(words)
    assert not any(word.startswith("-") for word in words)


def test_an_old_compiler_leaves_the_newest_kernels_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accepted: list[tuple[str, ...]] = []

    def run(_: Compiler, *arguments: str) -> None:
        if "-mavxvnni" in arguments:
            raise BuildError("unrecognized option")
        accepted.append(arguments)

    monkeypatch.setattr(Compiler, "run", run)
    compile_sources(Compiler("g++"), tmp_path, machine="x86_64")
    assert any(str(word).endswith("tiles_avxvnni.cpp") for words in accepted for word in words)


def test_every_special_source_is_there() -> None:
    assert {name for name in build._SPECIAL if not (build._SOURCES / name).exists()} == set()


def test_variables_of_a_prompt_are_read() -> None:
    assert parse_variables("Path=C:\\a;C:\\b\r\n\r\nINCLUDE=x=y\r\n=C:=C:\\") == {
        "PATH": "C:\\a;C:\\b",
        "INCLUDE": "x=y",
    }
