"""Space is set aside before a download's bytes come, as each system can; fakes stand for those that this is not."""

from __future__ import annotations

import ctypes
import errno
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.checkpoint.downloads import transfer as space

SIZE = 3 * 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"begun")
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux does it")
def test_on_linux_it_is_taken_at_once(file: Path) -> None:
    if space.reserve(file, SIZE):  # a file system may be unable to
        assert space.allocated(file) >= SIZE
    assert file.stat().st_size == SIZE
    assert file.read_bytes()[:6] == b"begun\0"


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_a_file_of_no_bytes_needs_none(file: Path, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert not space.reserve(file, 0)
    assert file.stat().st_size == 0


def test_another_system_gets_the_size_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    assert not space.reserve(file, SIZE)
    assert file.stat().st_size == SIZE


class MacOs:
    """`fcntl` as macOS has it."""

    def __init__(self, error: int = 0) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self._error = error

    def fcntl(self, _descriptor: int, command: int, argument: bytes) -> bytes:
        self.asked.append((command, struct.unpack("=Iiqqq", argument)))
        if self._error:
            raise OSError(self._error, "no")
        return argument


@pytest.mark.parametrize(("error", "reserved"), [(0, True), (errno.ENOTSUP, False)])
def test_macos_is_asked_for_what_is_missing(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: int, reserved: bool
) -> None:
    system = MacOs(error)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(space, "import_module", lambda _name: system)
    monkeypatch.setattr(space, "allocated", lambda _path: 2**20)
    assert space.reserve(file, SIZE) is reserved
    assert system.asked == [(42, (4, 3, 0, 2 * 2**20, 0))]
    assert file.stat().st_size == SIZE


def test_a_full_disk_of_macos_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(space, "import_module", lambda _name: MacOs(errno.ENOSPC))
    with pytest.raises(OSError, match="no"):
        space.reserve(file, SIZE)


class Windows:
    """What of Windows is asked: it moves a file's end."""

    def __init__(self, path: Path, code: int = 0) -> None:
        self.moved: list[tuple[int, int]] = []
        self._path, self._code = path, code

    def load(self, name: str, *, use_last_error: bool) -> Any:
        assert (name, use_last_error) == ("kernel32", True)
        return SimpleNamespace(SetFileInformationByHandle=self._set)

    def _set(self, _handle: Any, kind: int, end: Any, _size: int) -> int:
        self.moved.append((kind, end._obj.value))
        if not self._code:
            with self._path.open("r+b") as file:
                file.truncate(end._obj.value)
        return int(not self._code)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.setattr(ctypes, "WinDLL", self.load, raising=False)
        monkeypatch.setattr(ctypes, "get_last_error", lambda: self._code, raising=False)
        handles = SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)
        monkeypatch.setattr(space, "import_module", lambda _name: handles)


@pytest.mark.parametrize(("code", "reserved"), [(0, True), (50, False)])
def test_windows_moves_the_files_end(file: Path, monkeypatch: pytest.MonkeyPatch, code: int, reserved: bool) -> None:
    system = Windows(file, code)
    system.use(monkeypatch)
    assert space.reserve(file, SIZE) is reserved
    assert system.moved == [(6, SIZE)]
    assert file.stat().st_size == SIZE
    assert space.reserve(file, SIZE)  # it has its size already: nothing is asked
    assert len(system.moved) == 1


@pytest.mark.parametrize("code", [39, 112])
def test_a_full_disk_of_windows_is_said(file: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    Windows(file, code).use(monkeypatch)
    with pytest.raises(OSError, match="Windows error") as caught:
        space.reserve(file, SIZE)
    assert caught.value.errno == errno.ENOSPC
    assert file.stat().st_size == len(b"begun")
