"""Building llama.cpp: what does not run is built again with less, and only what ran counts as built."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.bench.llama_cpp import build as building
from engine.bench.llama_cpp.build import GROUPS, Instructions, PeerBuildError, build
from engine.bench.llama_cpp.peer import VERSION, home, receipt
from engine.common.files import try_lock, unlock


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The steps that take minutes or a network, replaced; holds what each compilation was asked to use."""
    asked: list[list[str]] = []

    def compile_(_say: Callable[[str], None], _jobs: int, instructions: Sequence[Instructions], _tree: object) -> None:
        asked.append([group.name for group in instructions])

    monkeypatch.setenv("CXX", "c++")
    for step in ("_make_environment", "_fetch_source"):
        monkeypatch.setattr(building, step, lambda _say: None)
    monkeypatch.setattr(building, "_install", lambda: None)
    monkeypatch.setattr(building, "_compile", compile_)
    monkeypatch.setattr(building, "working_instructions", lambda _compiler: list(GROUPS[:3]))
    return asked


def test_the_last_instructions_go_until_it_runs(compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "fault_of", lambda _python: "died of SIGILL" if len(compiled) < 3 else None)
    names = [group.name for group in GROUPS]
    assert build(lambda _text: None) == names[:1]
    assert compiled == [names[:3], names[:2], names[:1]]
    assert json.loads(receipt().read_text(encoding="utf-8")) == {"version": VERSION, "instructions": names[:1]}


def test_what_never_runs_is_not_built(compiled: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "fault_of", lambda _python: "died of SIGILL")
    with pytest.raises(PeerBuildError, match="died of SIGILL"):
        build(lambda _text: None)
    assert compiled[-1] == []
    assert not receipt().exists()


def test_two_do_not_build_at_once(compiled: list[list[str]]) -> None:
    home().mkdir(parents=True)
    with (home() / "lock").open("a+b") as lock:
        assert try_lock(lock.fileno())
        with pytest.raises(PeerBuildError, match="another process"):
            build(lambda _text: None)
        unlock(lock.fileno())
    assert not compiled


def test_progress_is_said_and_a_failure_points_to_its_log() -> None:
    home().mkdir(parents=True)
    heard: list[str] = []
    script = "print('[1/2] Building CXX object a.o'); print('error: no'); raise SystemExit(3)"
    with pytest.raises(PeerBuildError, match=r"build\.log"):
        building._run([sys.executable, "-c", script], heard.append)
    assert heard == ["[1/2]"]
    assert "error: no" in (home() / "build.log").read_text(encoding="utf-8")


def test_a_source_that_was_fetched_is_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    home().mkdir(parents=True)
    name = f"llama_cpp_python-{VERSION}"
    archive = home() / f"{name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo(f"{name}/CMakeLists.txt")
        member.size = 2
        tar.addfile(member, io.BytesIO(b"ok"))
    monkeypatch.setattr(building, "SDIST_SHA256", building._sha256(archive))
    monkeypatch.setattr(building, "_run", lambda *_: pytest.fail("nothing is to be fetched"))
    for _ in range(2):
        building._fetch_source(lambda _text: None)
        assert (home() / "source" / "CMakeLists.txt").read_bytes() == b"ok"
        archive.write_bytes(b"")


def test_a_source_that_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    home().mkdir(parents=True)
    archive = home() / f"llama_cpp_python-{VERSION}.tar.gz"
    monkeypatch.setattr(building, "_run", lambda *_: Path(archive).write_bytes(b"another"))
    with pytest.raises(PeerBuildError, match="expected"):
        building._fetch_source(lambda _text: None)
    assert not (home() / "source").exists()
