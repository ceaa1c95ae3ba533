"""Building the peers: what does not run is built again with less, and only what ran counts as built."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.peers import build as building
from benchmarks.peers.build import Builder, PeerBuildError, find_sources
from benchmarks.peers.editions import EDITIONS, IK_LLAMA_CPP, LLAMA_CPP, Edition
from benchmarks.peers.instructions import GROUPS, Instructions
from engine.common.files import take_lock


def builder(edition: Edition = LLAMA_CPP, heard: list[str] | None = None, named: Path | None = None) -> Builder:
    return Builder(edition, (heard if heard is not None else []).append, named=named)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The steps that take minutes or a network, replaced; holds what each compilation was asked to use."""
    asked: list[list[str]] = []

    def compile_(_builder: Builder, instructions: Sequence[Instructions], _tree: Path, _sources: Path) -> None:
        asked.append([group.name for group in instructions])

    monkeypatch.setenv("CXX", "c++")
    for step in ("_make_environment", "_install"):
        monkeypatch.setattr(Builder, step, lambda _builder: None)
    monkeypatch.setattr(Builder, "_sources", lambda _builder: Path("sources"))
    monkeypatch.setattr(Builder, "_compile", compile_)
    monkeypatch.setattr(building, "working_instructions", lambda _compiler: list(GROUPS[:3]))
    return asked


@pytest.mark.parametrize("edition", EDITIONS, ids=lambda edition: edition.name)
def test_the_last_instructions_go_until_it_runs(
    edition: Edition, compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "fault_of", lambda _edition: "died of SIGILL" if len(compiled) < 3 else None)
    names = [group.name for group in GROUPS]
    assert builder(edition).build() == names[:1]
    assert compiled == [names[:3], names[:2], names[:1]]
    receipt = json.loads(edition.receipt().read_text(encoding="utf-8"))
    assert receipt == {"version": edition.version, "instructions": names[:1], "sources": "sources"}


def test_what_never_runs_is_not_built(compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "fault_of", lambda _edition: "died of SIGILL")
    with pytest.raises(PeerBuildError, match="died of SIGILL"):
        builder().build()
    assert compiled[-1] == []
    assert not LLAMA_CPP.receipt().exists()


def test_two_do_not_build_at_once(compiled: list[list[str]]) -> None:
    LLAMA_CPP.home().mkdir(parents=True)
    lock = take_lock(LLAMA_CPP.home() / "lock")
    assert lock is not None
    with pytest.raises(PeerBuildError, match="another process"):
        builder().build()
    lock.release()
    assert not compiled


def test_progress_is_said_and_a_failure_points_to_its_log() -> None:
    LLAMA_CPP.home().mkdir(parents=True)
    heard: list[str] = []
    script = "print('[1/2] Building CXX object a.o'); print('error: no'); raise SystemExit(3)"
    with pytest.raises(PeerBuildError, match=r"build\.log"):
        builder(heard=heard)._run([sys.executable, "-c", script])
    assert heard == ["[1/2]"]
    assert "error: no" in (LLAMA_CPP.home() / "build.log").read_text(encoding="utf-8")


def test_a_source_that_was_fetched_is_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    LLAMA_CPP.home().mkdir(parents=True)
    archive = LLAMA_CPP.home() / f"{LLAMA_CPP.archive}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo(f"{LLAMA_CPP.archive}/{LLAMA_CPP.folder}/CMakeLists.txt")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"ok"))
    known = dataclasses.replace(LLAMA_CPP, sha256=building._sha256(archive))
    monkeypatch.setattr(Builder, "_run", lambda *_: pytest.fail("nothing is to be fetched"))
    for _ in range(2):
        assert (builder(known)._sources() / "CMakeLists.txt").read_bytes() == b"ok"
        archive.write_bytes(b"")


def test_a_source_that_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    LLAMA_CPP.home().mkdir(parents=True)
    archive = LLAMA_CPP.home() / f"{LLAMA_CPP.archive}.tar.gz"
    monkeypatch.setattr(Builder, "_run", lambda *_: Path(archive).write_bytes(b"another"))
    with pytest.raises(PeerBuildError, match="expected"):
        builder()._sources()
    assert not (LLAMA_CPP.home() / "source").exists()


def test_sources_that_somebody_names(tmp_path: Path) -> None:
    with pytest.raises(PeerBuildError, match=r"holds no sources of ik_llama\.cpp"):
        find_sources(IK_LLAMA_CPP, tmp_path)
    for folder in (tmp_path / "checkout", tmp_path / "archive" / IK_LLAMA_CPP.folder):
        (folder / "include").mkdir(parents=True)
        (folder / "include" / "llama.h").touch()
        (folder / "CMakeLists.txt").touch()
    assert builder(IK_LLAMA_CPP, named=tmp_path / "checkout")._sources() == (tmp_path / "checkout").resolve()
    assert find_sources(IK_LLAMA_CPP, tmp_path / "archive") == tmp_path / "archive" / IK_LLAMA_CPP.folder
    with pytest.raises(PeerBuildError, match="no Python binding"):
        find_sources(LLAMA_CPP, tmp_path / "checkout")
