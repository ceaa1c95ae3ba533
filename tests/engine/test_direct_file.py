"""Files read and written past the page cache: any place, any length, and a disk that hesitates."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.direct_file import DirectFile

PAGE = 4096
CONTENT = bytes(os.urandom(5 * PAGE + 777))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("direct") / "file"
    file.write_bytes(CONTENT)
    return file


@given(offset=st.integers(0, len(CONTENT) - 1), length=st.integers(0, len(CONTENT)), direct=st.booleans())
@settings(deadline=None, max_examples=150)
def test_any_piece_of_a_file(path: Path, offset: int, length: int, direct: bool) -> None:
    length = min(length, len(CONTENT) - offset)
    with closing(DirectFile(path, direct=direct)) as file:
        target = memoryview(bytearray(length))
        file.read_into(offset, target)
        assert bytes(target) == CONTENT[offset : offset + length]


@pytest.mark.parametrize("direct", [True, False])
def test_what_lies_behind_the_end_cannot_be_read(path: Path, direct: bool) -> None:
    file = DirectFile(path, direct=direct)
    with pytest.raises(EOFError):
        file.read_into(len(CONTENT) - 5, memoryview(bytearray(6)))
    file.close()


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads otherwise here")
@pytest.mark.parametrize("times", [1, 2])
def test_a_read_error_that_passes_is_not_told(path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    really, failed = os.preadv, 0
    file = DirectFile(path)

    def fail(descriptor: int, buffers: object, offset: int) -> int:
        nonlocal failed
        failed += 1
        if failed <= times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(descriptor, buffers, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", fail)
    target = memoryview(bytearray(PAGE))
    if times == 1:
        file.read_into(PAGE, target)
        assert bytes(target) == CONTENT[PAGE : 2 * PAGE]
    else:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file.read_into(PAGE, target)
    file.close()
