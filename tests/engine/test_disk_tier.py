"""The disk tier: every read ends, right or with an error that says why; counts are exact; closing leaves nothing."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts import disk_tier
from engine.experts.direct_file import DirectFile
from engine.experts.record import allocate_records
from tests.engine.made_up_records import (
    CPU,
    LARGE,
    SMALL,
    contents_of,
    disk_of,
    flip,
    place_of,
    random_records,
    write_records,
)

CONTENTS = contents_of([(16, SMALL), (8, LARGE), (16, SMALL)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_records(tmp_path / "a.gguf", CONTENTS)
    return tmp_path / "a.gguf"


def one(layer: int) -> torch.Tensor:
    return allocate_records(1, CONTENTS.tensors[layer].layout, CPU)[0]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("piece", [4096, disk_tier.PIECE_BYTES])
def test_many_reads_at_once(
    direct: bool, aligned: bool, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "PIECE_BYTES", piece)
    records = write_records(tmp_path / "a.gguf", CONTENTS)
    wanted = [(layer, expert) for layer, spec in enumerate(CONTENTS.tensors) for expert in range(spec.num_experts)] * 3
    random.Random(1).shuffle(wanted)
    with disk_of(tmp_path / "a.gguf", CONTENTS, direct=direct, readers=4) as disk:
        places = []
        for layer, _ in wanted:
            size = CONTENTS.tensors[layer].layout.nbytes
            places.append(one(layer) if aligned else torch.empty(size + 1, dtype=torch.uint8)[1:])
        reads = [
            disk.read(layer, expert, place, urgent=expert % 2 == 0)
            for (layer, expert), place in zip(wanted, places, strict=True)
        ]
        for read in reads[::3]:
            disk.hurry(read)
        for read, place, (layer, expert) in zip(reads, places, wanted, strict=True):
            read.result(60)
            assert torch.equal(place, records[layer][expert])
        assert disk.records_read == len(wanted)
        assert disk.bytes_read == 3 * CONTENTS.nbytes
        if not direct:
            assert not disk.is_direct


def test_many_who_meet_the_same_damage_have_it_repaired_once(path: Path) -> None:
    whole = path.read_bytes()
    begin = place_of(CONTENTS, 1, 3)
    good = random_records(CONTENTS)[1][3]
    flip(path, begin)
    calls = []

    def repair(layer: int, expert: int) -> torch.Tensor:
        calls.append((layer, expert))
        return good

    with disk_of(path, CONTENTS, repair=repair) as disk:
        places = [one(1) for _ in range(20)]
        for read in [disk.read(1, 3, place) for place in places]:
            read.result(60)
        assert all(torch.equal(place, good) for place in places)
        assert disk.records_repaired == len(calls) == 1
    assert path.read_bytes() == whole


@pytest.mark.parametrize("pieces", [4096, 2**21])
def test_what_the_disk_cannot_read_is_written_anew(path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "PIECE_BYTES", pieces)
    good, really, bad = random_records(CONTENTS)[1], DirectFile.read_into, {place_of(CONTENTS, 1, 3)}

    def fail(self: DirectFile, offset: int, target: memoryview) -> None:
        if any(offset <= place < offset + len(target) for place in bad):
            raise OSError(5, "Input/output error")
        really(self, offset, target)

    def repair(layer: int, expert: int) -> torch.Tensor:
        bad.remove(place_of(CONTENTS, layer, expert))
        return good[expert]

    monkeypatch.setattr(DirectFile, "read_into", fail)
    with disk_of(path, CONTENTS) as disk, pytest.raises(EngineError, match="cannot be read"):
        disk.read(1, 3, one(1)).result(60)
    with disk_of(path, CONTENTS, repair=repair) as disk:
        layer = allocate_records(8, LARGE, CPU)
        for read in [disk.read(1, expert, record) for expert, record in enumerate(layer)]:
            read.result(60)
        assert torch.equal(layer, good)
        assert disk.records_repaired == 1
        assert disk.note is not None


def test_a_file_that_becomes_shorter_under_us(path: Path) -> None:
    with disk_of(path, CONTENTS) as disk:
        os.truncate(path, place_of(CONTENTS, 2, 8))
        disk.read(2, 7, one(2)).result(60)
        for expert in (8, 15):
            with pytest.raises(EngineError, match="has become shorter") as caught:
                disk.read(2, expert, one(2)).result(60)
            assert caught.value.code == ErrorCode.CHECKPOINT_DAMAGED


def test_closing_ends_every_read_and_every_thread(path: Path) -> None:
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    before = threading.active_count()
    disk = disk_of(path, CONTENTS, readers=2)
    reads = [disk.read(1, expert % 8, one(1)) for expert in range(200)]
    disk.close()
    disk.close()
    assert all(read.done() for read in reads)
    ended_well = [read for read in reads if read.exception() is None]
    assert disk.records_read == len(ended_well)
    assert all("closed" in str(read.exception()) for read in reads if read.exception() is not None)
    assert threading.active_count() == before
    with pytest.raises(EngineError, match="closed"):
        disk.read(0, 0, one(0))
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) == open_files


def test_where_direct_access_is_refused_it_reads_as_others_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems that do not know the flag, and on those that take it and refuse the first read."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no such flag here")
    really_open, really_read = os.open, os.preadv
    direct: set[int] = set()

    def refuse_to_open(name: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really_open(name, flags, *rest)  # type: ignore[arg-type]

    def remember(name: object, flags: int, *rest: int) -> int:
        descriptor = really_open(name, flags, *rest)  # type: ignore[arg-type]
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def refuse_to_read(descriptor: int, buffers: object, offset: int) -> int:
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return really_read(descriptor, buffers, offset)  # type: ignore[arg-type]

    for stand_in in (refuse_to_open, remember):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", stand_in)
            if stand_in is remember:
                patch.setattr(os, "preadv", refuse_to_read)
            with disk_of(path, CONTENTS, readers=1) as disk:
                assert not disk.is_direct
                disk.read(1, 0, one(1)).result(60)


def test_a_direct_read_that_is_refused_later_goes_on_as_others_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with disk_of(path, CONTENTS, readers=1) as disk:
        really_read, refused = os.preadv, list[int]()

        def refuse_once(descriptor: int, buffers: object, offset: int) -> int:
            if not refused:
                refused.append(descriptor)
                raise OSError(22, "Invalid argument")
            return really_read(descriptor, buffers, offset)  # type: ignore[arg-type]

        if not disk.is_direct:
            pytest.skip("this file system has no direct access")
        monkeypatch.setattr(os, "preadv", refuse_once)
        disk.read(1, 0, one(1)).result(60)
        assert refused
