"""Files are mapped where that is safe, and read elsewhere: the same bytes either way."""

import mmap
import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from engine.experts import file_image
from engine.experts.direct_file import DirectFile
from engine.experts.file_image import FileImage, MappedFile, dropped_note, map_file
from engine.hardware.surroundings import _in_use
from engine.kernels.native.build import library_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux alone")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is worth mapping whatever its pages are."""
    monkeypatch.setattr(file_image, "_TRIED", 2**16)
    monkeypatch.setattr(file_image, "_PIECE", 2**16)
    monkeypatch.setattr(file_image, "stays_connected", lambda _path: True)
    monkeypatch.setattr(file_image, "available_ram", lambda: 2**50)
    path = tmp_path / "file"
    path.write_bytes(random.Random(7).randbytes(10 * 2**16 + 4321))
    return path


def test_a_mapped_image_is_the_file_and_counts_as_used_memory(file: Path) -> None:
    content, before = file.read_bytes(), _in_use[0]
    image = FileImage(file)
    assert image._mapped is not None
    assert image.nbytes == len(content) == _in_use[0] - before
    image.wait_for(100_000)
    assert bytes(image.bytes[:100_000]) == content[:100_000]
    image.wait_for(len(content))
    image.close()
    assert bytes(image.bytes) == content
    image.bytes[:5] = b"other"
    assert file.read_bytes() == content
    file.unlink()
    assert bytes(image.bytes[5:]) == content[5:]
    part = image.bytes[100:]
    del image
    assert _in_use[0] == before + len(content)
    del part
    assert _in_use[0] == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_TRIED", 2**30),
        ("stays_connected", lambda _path: False),
        ("available_ram", lambda: file_image._SPARE),
    ],
    ids=["few bytes", "a disk that may go", "little memory"],
)
def test_else_it_is_copied(file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    before = _in_use[0]
    monkeypatch.setattr(file_image, name, value)
    image = FileImage(file)
    assert image._mapped is None
    image.wait_for(file.stat().st_size)
    assert bytes(image.bytes) == file.read_bytes()
    assert image.nbytes == file.stat().st_size
    assert _in_use[0] == before
    image.close()


def test_an_older_system_copies(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_image, "_POPULATE_READ", 12345)
    with closing(DirectFile(file)) as opened:
        assert map_file(opened) is None


def test_a_file_that_became_shorter_is_told_and_kills_nobody(file: Path) -> None:
    with closing(DirectFile(file)) as opened:
        mapped = MappedFile(opened)
        os.truncate(file, 2**16)
        mapped.read(0, 2**16)
        with pytest.raises(OSError, match=r"\[Errno"):
            mapped.read(2**17, 2**16)


_READS_WHAT_IS_GONE = """
import os, sys
from pathlib import Path
from engine.experts.direct_file import DirectFile
from engine.experts.file_image import MappedFile
path = Path(sys.argv[1])
others = MappedFile(DirectFile(path.with_name("other")))
others.watch()
del others
mapped = MappedFile(DirectFile(path))
mapped.watch()
os.truncate(path, 2**16)
mapped.memory[2**17]
"""


@pytest.mark.skipif(not library_path().exists(), reason="needs the native library")
def test_a_process_that_reads_what_is_gone_ends_with_a_sentence(file: Path) -> None:
    file.with_name("other").write_bytes(bytes(2**17))
    done = subprocess.run(
        [sys.executable, "-c", _READS_WHAT_IS_GONE, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr.split()
        == (
            f"{file} became shorter, or its disk failed, while it was in use. "
            "Switchyard had to end: put the whole file back, then start again."
        ).split()
    )


def test_what_the_system_dropped_is_told(file: Path) -> None:
    with closing(DirectFile(file)) as opened:
        os.fsync(opened.descriptor)
        mapped = MappedFile(opened)
        mapped.read(0, file.stat().st_size)
        assert dropped_note() == ""
        mapped.memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(opened.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        note = dropped_note()
        if not note:
            pytest.skip("this file system drops nothing")
        assert note.startswith("Other programs have pushed 100% of the weights out of memory.")
        assert bytes(mapped.memory) == file.read_bytes()
        assert dropped_note() == ""
        del mapped
    assert dropped_note() == ""
