"""Files are mapped where that gives huge pages, and read as ever elsewhere: the same bytes either way."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from engine.experts import file_image, mapped_file
from engine.experts.file_image import FileImage
from engine.experts.mapped_file import MappedFile, map_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux alone")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is worth mapping whatever its pages are."""
    monkeypatch.setattr(mapped_file, "_TRIED", 2**16)
    monkeypatch.setattr(mapped_file, "_ENOUGH", 0.0)
    monkeypatch.setattr(file_image, "_PIECE", 2**16)
    path = tmp_path / "file"
    path.write_bytes(random.Random(7).randbytes(10 * 2**16 + 4321))
    return path


def test_a_mapped_image_is_the_file_and_takes_no_memory_of_ours(file: Path) -> None:
    content = file.read_bytes()
    image = FileImage(file)
    assert image._mapped is not None
    image.wait_for(100_000)
    assert bytes(image.bytes[:100_000]) == content[:100_000]
    image.wait_for(len(content))
    image.close()
    assert image.nbytes == 0
    assert bytes(image.bytes) == content
    image.bytes[:5] = b"other"
    assert file.read_bytes() == content
    file.unlink()
    assert bytes(image.bytes[5:]) == content[5:]


def test_without_huge_pages_or_with_few_bytes_it_is_copied(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_ENOUGH", 2.0), ("_TRIED", 2**30)):
        with monkeypatch.context() as changed:
            changed.setattr(mapped_file, name, value)
            image = FileImage(file)
            assert image._mapped is None
            image.wait_for(file.stat().st_size)
            assert bytes(image.bytes) == file.read_bytes()
            assert image.nbytes == file.stat().st_size
            image.close()


def test_an_older_system_copies(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_file, "_POPULATE_READ", 12345)
    with file.open("rb") as opened:
        assert map_file(opened.fileno(), file.stat().st_size) is None


def test_a_file_that_became_shorter_is_told_and_kills_nobody(file: Path) -> None:
    with file.open("rb") as opened:
        mapped = MappedFile(opened.fileno(), file.stat().st_size)
        os.truncate(file, 2**16)
        mapped.read(0, 2**16)
        with pytest.raises(OSError, match=r"\[Errno"):
            mapped.read(2**17, 2**16)


def test_huge_pages_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(64 * 2**20))
    with path.open("rb") as opened:
        mapped = MappedFile(opened.fileno(), 64 * 2**20)
        mapped.read(0, 64 * 2**20)
        assert 0 <= mapped.huge_bytes() <= 64 * 2**20
