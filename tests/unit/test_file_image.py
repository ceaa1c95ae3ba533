"""A file comes into memory whole and in order, early or late, and what goes wrong is told to whoever waits."""

import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engine.common.config import EngineConfig
from engine.experts import file_image
from engine.experts.direct_file import DirectFile
from engine.experts.file_image import EarlyReads, FileImage, remember, remembered


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_image, "_PIECE", 2**16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(7).randbytes(10 * 2**16 + 4321))
    return path


@pytest.mark.parametrize("cached", [True, False])
def test_the_whole_file_is_there(file: Path, cached: bool) -> None:
    content = file.read_bytes()
    if not cached and hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    image = FileImage(file)
    image.wait_for(100_000)
    assert bytes(image.bytes[:100_000]) == content[:100_000]
    image.wait_for(len(content))
    assert bytes(image.bytes) == content
    assert image.nbytes == len(content)
    image.close()
    image.close()
    image.wait_for(len(content))
    assert bytes(image.bytes) == content


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    image = FileImage(tmp_path / "empty")
    image.wait_for(0)
    image.close()
    with pytest.raises(FileNotFoundError):
        FileImage(tmp_path / "none")


def test_a_read_that_fails_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: DirectFile, offset: int, target: memoryview) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DirectFile, "read_cached", lambda *_: 0)
    monkeypatch.setattr(DirectFile, "read_into", broken)
    image = FileImage(file)
    with pytest.raises(OSError, match="Input/output"):
        image.wait_for(1)
    image.close()


def test_a_reader_that_breaks_lets_nobody_wait_for_ever(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr(DirectFile, "read_cached", broken)
    image = FileImage(file)
    with pytest.raises(OSError, match="MemoryError"):
        image.wait_for(1)
    image.close()


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="only where threads have a priority of their own")
def test_a_sandbox_may_forbid_a_lower_priority(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbidden)
    image = FileImage(file)
    image.wait_for(file.stat().st_size)
    image.close()
    assert bytes(image.bytes) == file.read_bytes()


def test_closing_wakes_who_waits(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, failed = threading.Event(), []

    def slow(*_: object) -> int:
        goes_on.wait()
        return 0

    monkeypatch.setattr(DirectFile, "read_cached", slow)
    image = FileImage(file)

    def wait() -> None:
        try:
            image.wait_for(file.stat().st_size)
        except OSError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    closing = threading.Thread(target=image.close)
    closing.start()
    waiting.join()
    goes_on.set()
    closing.join()
    assert len(failed) == 1


def _config(folder: Path, precision: str = "int8") -> EngineConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return EngineConfig(str(folder), precision=precision)


def test_what_the_last_start_read_is_read_early(file: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "model")
    reads = EarlyReads()
    reads.begin(config.model, config.asked)
    assert reads.nbytes == 0
    remember(config.model, config.asked, [file, tmp_path / "gone"])
    assert remembered(config.model, config.asked) == [file]
    assert remembered(config.model, replace(config, precision="int4").asked) == []
    reads.begin(config.model, config.asked)  # too late: this process has begun once
    assert reads.nbytes == 0
    reads = EarlyReads()
    reads.begin(config.model, config.asked)
    image = reads.take(file)
    image.wait_for(file.stat().st_size)
    assert bytes(image.bytes) == file.read_bytes()
    image.close()
    assert reads.nbytes == 0
    reads.drop()


def test_a_file_that_changed_meanwhile_is_read_anew(file: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "model")
    remember(config.model, config.asked, [file])
    reads = EarlyReads()
    reads.begin(config.model, config.asked)
    assert reads.nbytes >= 0  # it has been opened
    file.unlink()
    file.write_bytes(b"another")
    image = reads.take(file)
    image.wait_for(7)
    assert bytes(image.bytes) == b"another"
    image.close()


def test_with_little_memory_nothing_is_read_early(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path / "model")
    remember(config.model, config.asked, [file])
    monkeypatch.setattr(file_image, "available_ram", lambda: file.stat().st_size)
    reads = EarlyReads()
    reads.begin(config.model, config.asked)
    assert reads.nbytes == 0
    reads.drop()


def test_no_note_that_is_damaged_or_a_model_that_is_gone_stops_a_start(file: Path, tmp_path: Path) -> None:
    config = _config(tmp_path / "model")
    remember(config.model, config.asked, [file])
    for content in (b"", b"[]", b"{", b'{"asked": 1, "files": 2}', b'{"files": ["\\u0000"]}'):
        file_image._note_of(config.model).write_bytes(content)
        assert remembered(config.model, config.asked) == []
    gone = EngineConfig(str(tmp_path / "none"))
    remember(gone.model, gone.asked, [file])
    assert remembered(gone.model, gone.asked) == []
