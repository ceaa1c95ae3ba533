"""Which instruction sets are believed: those whose self-test passes in a process that may die of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kernels.native import build, library
from engine.kernels.native.build import Compiler
from engine.kernels.native.library import _ABI, Isa, load_kernels, missing_note, proven

_PRETENDED = """
extern "C" int switchyard_abi() { return %(abi)d; }
extern "C" unsigned switchyard_advertised_isas() { return %(advertised)d; }
extern "C" int switchyard_self_test(int isa) {
    if (isa == %(traps)d) __builtin_trap();
    return isa == %(errs)d ? 6 : 0;
}
"""

Make = Callable[..., Path]


@pytest.fixture
def pretended(tmp_path: Path) -> Make:
    """Makes a library that says what a processor's would."""
    try:
        compiler = build.find_compiler()
    except build.BuildError as why:
        pytest.skip(str(why))

    def make(*, abi: int = _ABI, advertised: int = 0b11111, traps: int = -1, errs: int = -1) -> Path:
        values = {"abi": abi, "advertised": advertised, "traps": traps, "errs": errs}
        source, target = tmp_path / "pretended.cpp", tmp_path / "pretended.so"
        source.write_text(_PRETENDED % values, encoding="ascii")
        compiler.run("-shared", "-fPIC", str(source), "-o", str(target))
        return target

    return make


def test_what_is_advertised_and_traps_is_not_used(pretended: Make) -> None:
    assert proven(pretended(traps=Isa.AVX512_VNNI)) == [Isa.PORTABLE, Isa.AVX2, Isa.AVX_VNNI, Isa.AVX512]


def test_what_computes_wrongly_is_not_used(pretended: Make) -> None:
    assert proven(pretended(errs=Isa.AVX_VNNI)) == [Isa.PORTABLE, Isa.AVX2, Isa.AVX512, Isa.AVX512_VNNI]


def test_a_processor_without_avx2_has_the_portable_kernels(pretended: Make) -> None:
    assert proven(pretended(advertised=1)) == [Isa.PORTABLE]


def test_instruction_sets_of_arm_are_known(pretended: Make) -> None:
    assert proven(pretended(advertised=1 | 1 << 16 | 1 << 17)) == [Isa.PORTABLE, Isa.NEON, Isa.NEON_DOT]


def test_a_library_of_another_interface_is_not_used_and_told(pretended: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pretended(abi=_ABI - 1)
    monkeypatch.setattr(library, "library_path", lambda: path)
    assert proven(path) == []
    assert load_kernels(threads=2) is None
    assert "self-test" in missing_note()


def test_a_file_that_is_no_library_is_not_used(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"cut short")
    assert proven(broken) == []


def test_a_library_built_from_other_sources_is_ignored_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "switchyard_kernels-0123456789abcdef-x86_64.so"
    monkeypatch.setattr(library, "library_path", lambda: mine)
    monkeypatch.setattr(build, "library_path", lambda: mine)
    assert "install a C++ compiler" in missing_note()
    (tmp_path / "switchyard_kernels-fedcba9876543210-x86_64.so").write_bytes(b"of another version")
    assert load_kernels(threads=2) is None
    assert "another version" in missing_note()


def test_a_new_build_takes_the_place_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "switchyard_kernels-0123456789abcdef-x86_64.so"
    others = [tmp_path / f"switchyard_kernels-fedcba9876543210-x86_64{end}" for end in (".so", ".proven.json")]
    for other in others:
        other.write_text("{}")
    monkeypatch.setattr(build, "library_path", lambda: mine)
    monkeypatch.setattr(build, "_SUFFIX", ".so")
    monkeypatch.setattr(build, "find_compiler", lambda: Compiler("none"))
    monkeypatch.setattr(build, "compile_sources", lambda *_: [])
    monkeypatch.setattr(Compiler, "link", lambda _, __, target: target.write_bytes(b"built"))
    assert build.build() == mine
    assert sorted(tmp_path.iterdir()) == [mine]


def test_a_verdict_holds_until_the_processor_is_another(pretended: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pretended()
    assert proven(path)[-1] is Isa.AVX512_VNNI
    tried: list[int] = []
    monkeypatch.setattr(library, "_passes", lambda _, isa: tried.append(isa) or isa <= Isa.AVX2)
    assert proven(path)[-1] is Isa.AVX512_VNNI
    assert not tried
    monkeypatch.setattr(library, "processor", lambda: "moved to an older one")
    assert proven(path) == [Isa.PORTABLE, Isa.AVX2]
    assert proven(path) == [Isa.PORTABLE, Isa.AVX2]
    assert len(tried) == 5


def test_a_damaged_verdict_is_proven_again(pretended: Make) -> None:
    path = pretended(advertised=3)
    for damaged in ("", "[]", '{"machine": 1}', json.dumps({"machine": None, "isas": [99]})):
        path.with_suffix(".proven.json").write_text(damaged)
        assert proven(path) == [Isa.PORTABLE, Isa.AVX2]


def test_a_self_test_without_an_answer_is_tried_again(pretended: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = subprocess.run, []

    def sleeps_through_it(*command: object, **options: object) -> object:
        asked.append(command)
        if len(asked) <= 2:
            raise subprocess.TimeoutExpired("python", 20)
        return run(*command, **options)  # type: ignore[call-overload]

    path = pretended(advertised=3)
    monkeypatch.setattr(library.subprocess, "run", sleeps_through_it)
    assert proven(path) == [Isa.AVX2]  # the portable kernels' test was tried twice for nothing
    assert not path.with_suffix(".proven.json").exists()
    assert proven(path) == [Isa.PORTABLE, Isa.AVX2]
    assert path.with_suffix(".proven.json").exists()
