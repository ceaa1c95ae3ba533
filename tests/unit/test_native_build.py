"""What each compiler is told for each kind of processor; nothing is compiled here."""

import subprocess
from pathlib import Path

import pytest

from engine.kernels.native import build
from engine.kernels.native.build import (
    BuildError,
    Compiler,
    architecture,
    compile_sources,
    find_compiler,
    parse_variables,
)


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


def visual_studio(folder: Path) -> tuple[Path, Path]:
    """An installation as the Build Tools with Clang leave it: the finder, and where it says that they are."""
    finder = folder / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
    place = folder / "BuildTools"
    for file in (
        finder,
        place / "VC" / "Auxiliary" / "Build" / "vcvarsall.bat",
        place / "VC" / "Tools" / "Llvm" / "x64" / "bin" / "clang-cl.exe",
    ):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    return finder, place


def on_windows(monkeypatch: pytest.MonkeyPatch, programs: Path, installed: str) -> None:
    """Makes this a Windows without other compilers whose finder says `installed`."""

    def run(command: object, **_: object) -> subprocess.CompletedProcess[str]:
        if isinstance(command, list):
            if not Path(command[0]).exists():
                raise FileNotFoundError(command[0])
            return subprocess.CompletedProcess(command, 0, f"{installed}\r\n", "")
        return subprocess.CompletedProcess([], 0, "INCLUDE=C:\\inc\r\nLib=C:\\lib\r\n", "")

    monkeypatch.setattr(build.sys, "platform", "win32")
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    monkeypatch.setattr(build.subprocess, "run", run)
    monkeypatch.setattr(build, "architecture", lambda: "x86")
    monkeypatch.setenv("PROGRAMFILES(X86)", str(programs))
    monkeypatch.delenv("CXX", raising=False)


def test_the_clang_of_visual_studio_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, place = visual_studio(tmp_path)
    on_windows(monkeypatch, tmp_path, str(place))
    found = find_compiler()
    assert found.is_clang_cl
    assert found.environment == {"INCLUDE": "C:\\inc", "LIB": "C:\\lib"}


@pytest.mark.parametrize("what", ["no Visual Studio", "one without Clang"])
def test_without_it_the_message_says_what_to_install(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finder, _ = visual_studio(tmp_path)
    if what == "no Visual Studio":
        finder.unlink()
    on_windows(monkeypatch, tmp_path, "")
    with pytest.raises(BuildError, match="Clang"):
        find_compiler()
