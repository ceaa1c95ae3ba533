"""Blocks on disk: within the budget, found if whole, and harmless whatever happens to their files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.common.kept_context import (
    KeptContextSettings,
    clear_kept_context,
    kept_context_bytes,
    kept_context_dir,
    kept_context_settings,
    kept_files,
    room_on_disk,
    save_kept_context_settings,
)
from engine.common.paths import config_dir
from engine.runtime.kept.files import KeptFiles


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def data_of(number: int, nbytes: int = 1000) -> memoryview:
    return memoryview(bytearray((number + place) % 251 for place in range(nbytes)))


def read(files: KeptFiles, number: int, nbytes: int = 1000) -> bytes | None:
    target = bytearray(nbytes)
    return bytes(target) if files.read_into(key_of(number), memoryview(target)) else None


def add(files: KeptFiles, *numbers: int, nbytes: int = 1000) -> list[bool]:
    with files.writing() as writing:
        assert writing is not None
        writing.spare(map(key_of, numbers))
        return [writing.add(key_of(n), index, b"[]", data_of(n, nbytes)) for index, n in enumerate(numbers)]


_DO = st.lists(
    st.tuples(
        st.sampled_from(["add", "read", "use", "break", "other", "clear"]), st.integers(0, 12), st.integers(1, 3)
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(steps=_DO, budget=st.integers(500, 9000))
def test_the_budget_holds_and_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], budget: int
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    files, other = (KeptFiles(folder, lambda _folder, _held: budget) for _ in range(2))
    broken = set[int]()
    for what, number, count in steps:
        path = folder / f"{key_of(number).hex()}.kept"
        if what in ("add", "other"):
            there = add(files if what == "add" else other, *range(number, number + count))
            assert all((folder / f"{key_of(number + i).hex()}.kept").exists() for i, is_in in enumerate(there) if is_in)
        elif what == "read":
            found = read(files, number)
            if found is not None:
                assert found == bytes(data_of(number))
            assert (found is not None) == path.exists()  # what is damaged is gone now
            broken.discard(number)
        elif what == "use":
            files.used([key_of(number)])
        elif what == "break" and path.exists():
            content = bytearray(path.read_bytes())
            content[count * 31 % len(content)] ^= 1
            path.write_bytes(content[: len(content) - (count - 1)])
            broken.add(number)
        elif what == "clear":
            path.unlink(missing_ok=True)
        assert sum(file.stat().st_size for file in folder.glob("*.kept")) <= budget
        assert not list(folder.glob("*.part"))
    whole = sum(file.stat().st_size for file in folder.glob("*.kept"))
    with files.writing() as writing:
        assert writing is not None
        assert writing.held == whole


def test_what_was_of_no_use_for_longest_gives_way_and_the_end_before_the_beginning(tmp_path: Path) -> None:
    size = 1000 + 60 + 2
    files = KeptFiles(tmp_path, lambda _folder, _held: 5 * size)
    assert add(files, 1, 2, 3) == [True] * 3
    assert add(files, 4, 5) == [True] * 2
    files.used([key_of(1), key_of(2), key_of(3)])
    assert add(files, 6, 7) == [True] * 2
    assert [number for number in range(1, 8) if files.has(key_of(number))] == [1, 2, 3, 6, 7]
    assert add(files, 8) == [True]
    assert [number for number in range(1, 9) if files.has(key_of(number))] == [1, 2, 6, 7, 8]
    with files.writing() as writing:
        assert writing is not None
        writing.spare([key_of(number) for number in (1, 2, 6, 7, 8)])
        assert not writing.add(key_of(9), 0, b"[]", data_of(9))


def test_files_are_private_and_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    files = KeptFiles(folder, lambda _folder, _held: 10**6)
    add(files, 1)
    (file,) = folder.glob("*.kept")
    if os.name != "nt":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    part = file.with_name(f"{key_of(2).hex()}.part")
    part.write_bytes(file.read_bytes()[:50])
    (folder / "notes.txt").write_text("mine")
    assert read(files, 2) is None
    add(files, 3)
    assert not part.exists()
    assert (folder / "notes.txt").read_text() == "mine"
    assert len(kept_files(folder)) == 2


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KeptFiles(tmp_path, lambda _folder, _held: 10**6)

    def full(*_args: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "utime", full)
    with pytest.raises(OSError, match="No space"):
        add(files, 1)
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob("*.kept"))
    assert files.nbytes == 0


def test_another_program_that_writes_is_waited_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.common.kept_context._PATIENCE_S", 0.05)
    one, other = (KeptFiles(tmp_path, lambda _folder, _held: 10**6) for _ in range(2))
    with one.writing() as mine, other.writing() as theirs:
        assert mine is not None
        assert theirs is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"on_disk": 1, "disk_bytes": 5}', '{"on_disk": true}', "[" * 9999])
def test_settings_that_make_no_sense_are_the_usual_ones(text: str) -> None:
    config_dir().mkdir(parents=True, exist_ok=True)
    (config_dir() / "kept-context.json").write_text(text)
    assert kept_context_settings() == KeptContextSettings()
    save_kept_context_settings(KeptContextSettings(False, 10**9))
    assert kept_context_settings() == KeptContextSettings(False, 10**9)
    assert room_on_disk(config_dir(), 0) == 0


def test_the_verb_shows_clears_and_turns_off(capsys: pytest.CaptureFixture[str]) -> None:
    add(KeptFiles(kept_context_dir()), 1, 2)
    assert kept_context_bytes() > 2000
    assert main(["kept"]) == 0
    assert "are kept in" in capsys.readouterr().out
    assert main(["kept", "on", "--budget", "2GB"]) == 0
    assert kept_context_settings() == KeptContextSettings(True, 2 * 10**9)
    assert main(["kept", "on", "--budget", "1kB"]) == 2
    assert "between" in capsys.readouterr().err
    assert main(["kept", "off", "--json"]) == 0
    assert '"on_disk": false' in capsys.readouterr().out
    assert kept_context_bytes() == clear_kept_context() == 0
    assert add(KeptFiles(kept_context_dir()), 1) == [False]
