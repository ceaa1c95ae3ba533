"""Whole files, and files for the user alone."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.common.errors import EngineError
from engine.common.files import (
    NewFile,
    PrivateLog,
    holding,
    is_locked,
    make_private,
    private_file,
    private_folder,
    remove_left_over,
    take_lock,
    write_private,
    write_whole,
)
from engine.common.paths import chosen_data_dir_file, data_dir, own_dirs

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_our_files_are_for_the_user_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        write_private(tmp_path / "a" / "b" / "settings.json", "{}")
        private_folder(tmp_path / "c" / "d")
        private_file(tmp_path / "c" / "chats")
    assert {mode(tmp_path / name) for name in ("a", "a/b", "c", "c/d")} == {0o700}
    assert {mode(tmp_path / name) for name in ("a/b/settings.json", "c/chats")} == {0o600}


@posix
@pytest.mark.parametrize(("mask", "expected"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_what_the_user_asks_for_has_the_usual_mode_and_is_private_until_it_is_whole(
    tmp_path: Path, mask: int, expected: int
) -> None:
    path = tmp_path / "answers.csv"
    with umask(mask), NewFile(path) as new:
        new.path.write_text("half")
        assert mode(new.path) == 0o600
        new.take_place()
    assert mode(path) == expected
    assert os.listdir(tmp_path) == ["answers.csv"]


@posix
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    path.touch()
    path.chmod(0o640)
    write_whole(path, "new")
    assert (path.read_text(), mode(path)) == ("new", 0o640)


@pytest.mark.parametrize("write", [write_whole, write_private])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, write: type, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["kept.json"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    new = NewFile(path)
    kept = {tmp_path / ".answers.csv.mine.part", tmp_path / f".other{new.path.name}"}
    for file in kept:
        file.touch()
    remove_left_over(path)
    assert set(tmp_path.iterdir()) == kept


def test_a_file_in_the_way_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            private_folder(folder)


@posix
def test_what_an_earlier_version_left_open_to_all_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch(0o644)
    with umask(0o022):
        for folder in own_dirs():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "old").write_text("what I said")
    (data_dir() / "link").symlink_to(elsewhere)
    make_private(own_dirs())
    assert {mode(folder) for folder in own_dirs()} == {0o700}
    assert {mode(folder / "old") for folder in own_dirs()} == {0o600}
    assert mode(elsewhere) == 0o644


@posix
def test_a_folder_that_the_user_chose_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    chosen = tmp_path / "shared"
    chosen.mkdir()
    chosen.chmod(0o755)
    write_private(chosen_data_dir_file(), f"{chosen}\n")
    make_private(own_dirs())
    write_private(chosen / "window.json", "{}")
    write_private(chosen / "jobs" / "window.json", "{}")
    assert (mode(chosen), mode(chosen / "jobs")) == (0o755, 0o700)
    assert mode(chosen / "window.json") == 0o600


@posix
def test_logs_stay_private_when_they_are_rotated(tmp_path: Path) -> None:
    import logging

    log = PrivateLog(tmp_path / "window.log", max_bytes=100, older=1)
    with umask(0o022):
        for _ in range(5):
            log.emit(logging.makeLogRecord({"msg": "x" * 60}))
    log.close()
    assert {mode(path) for path in tmp_path.iterdir()} == {0o600}
    assert len(list(tmp_path.iterdir())) == 2


def test_files_are_put_in_place_by_one_piece_of_code() -> None:
    """Elsewhere only whole folders, downloads and the like are renamed into place."""
    checkout = Path(__file__).resolve().parents[2]
    makers = {
        str(path.relative_to(checkout))
        for folder in ("engine", "app")
        for path in (checkout / folder).rglob("*.py")
        if "NamedTemporaryFile(" in (text := path.read_text(encoding="utf-8"))
        or ("mkstemp(" in text and ".replace(" in text)
    }
    assert makers == set()


@pytest.mark.parametrize(("code", "is_replaced"), [(5, True), (32, True), (None, False)])
def test_a_reader_of_the_old_file_delays_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, *, is_replaced: bool
) -> None:
    """On Windows nothing takes the place of a file that is open; virus scanners open every file."""
    replace, left = Path.replace, [2]

    def held(path: Path, target: Path) -> Path:
        if left[0]:
            left[0] -= 1
            error = PermissionError(errno.EACCES, "it is being used by another process")
            error.winerror = code  # type: ignore[attr-defined,unused-ignore]
            raise error
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", held)
    monkeypatch.setattr("engine.common.files._REPLACE_AGAIN_S", 0.0)
    path = tmp_path / "wanted.json"
    with contextlib.nullcontext() if is_replaced else pytest.raises(PermissionError):
        write_private(path, "{}")
    assert path.exists() == is_replaced
    assert list(tmp_path.iterdir()) == ([path] if is_replaced else [])


HOLDER = """
import sys
from pathlib import Path
from engine.common.files import take_lock
lock = take_lock(Path(sys.argv[1]))
print(lock is not None, flush=True)
sys.stdin.read()
"""


def test_a_lock_is_held_by_one_and_dies_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "True\n"
        assert is_locked(path)
        assert take_lock(path) is None
        with pytest.raises(EngineError, match="busy"), holding(path, 0.0, "It is busy."):
            pass
        holder.kill()
    with holding(path, 10.0, "It is busy."):
        path.unlink()  # whoever comes now makes it anew, and this one guards nothing
        other = take_lock(path)
        other.release()
