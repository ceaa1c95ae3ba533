"""Preparing a bank where the disk is full or cannot be written: said early, and nothing half-made is left."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.common.errors import EngineError, ErrorCode
from engine.experts.bank_writer import part_path
from engine.experts.direct_file import DirectFile
from engine.runtime.load.prepare_bank import BankSource
from tests.engine.prepare_bank_parts import assert_holds, prepare
from tests.engine.tiny_families import tiny_checkpoint


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return tiny_checkpoint("mixtral", tmp_path / "mixtral", num_hidden_layers=5)


def with_file_limit(nbytes: int, work: Callable[[], None]) -> None:
    """Runs it with files limited to so many bytes: the nearest to a full disk that a test may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_before_anything_is_written(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("engine.experts.bank_writer.shutil.disk_usage", lambda folder: usage._replace(free=70_000))
    source, path = BankSource.open(mixtral), tmp_path / "banks" / "tiny.bank"
    with pytest.raises(EngineError, match=r"kB .*banks.*70 kB") as caught:
        prepare(source, path)
    assert caught.value.code == ErrorCode.DISK_FULL
    assert list(path.parent.iterdir()) == []


def test_a_file_that_may_not_grow(mixtral: Path, tmp_path: Path) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "banks" / "tiny.bank"

    def fails() -> None:
        with pytest.raises(EngineError) as caught:
            prepare(source, path)
        assert caught.value.code == ErrorCode.DISK_FULL

    with_file_limit(source.header().layer_offsets[2] + 5000, fails)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("fits", [0, 2])
def test_a_disk_that_fills_up_meanwhile(
    fits: int, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = BankSource.open(mixtral), tmp_path / "tiny.bank"
    header, write = source.header(), DirectFile.write

    def until_full(self: DirectFile, offset: int, data: memoryview) -> None:
        if offset + len(data) > header.layer_offsets[fits] + 5000:
            write(self, offset, data[:4096])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", until_full)
        with pytest.raises(EngineError) as caught:
            prepare(source, path)
    assert caught.value.code == ErrorCode.DISK_FULL
    assert not path.exists()
    assert part_path(path).exists() == (fits > 0)  # worth keeping only if something of it is finished
    assert prepare(source, path).resumed_bytes == fits * header.layers[0].nbytes
    assert_holds(path, source)


def test_a_folder_that_cannot_be_written(mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "banks").write_text("no folder")
    with pytest.raises(EngineError, match="written"):
        prepare(BankSource.open(mixtral), tmp_path / "banks" / "tiny.bank")
