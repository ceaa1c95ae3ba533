"""The file of converted weights: what is written is read, and nothing else is taken for it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.gguf.file import read_gguf
from engine.common.errors import EngineError, ErrorCode
from engine.common.footprint import RECORD_ALIGNMENT
from engine.experts import container
from engine.experts.container import (
    ContainerWriter,
    Contents,
    UnusableContainerError,
    open_container,
    reopen,
)
from engine.formats.tiles import RecordLayout
from tests.engine.made_up_records import (
    LARGE,
    SMALL,
    contents_of,
    disk_of,
    flip,
    place_of,
    random_records,
    write_records,
)

CONTENTS = contents_of([(6, SMALL), (4, LARGE), (6, SMALL)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_records(tmp_path / "a.gguf", CONTENTS)
    return tmp_path / "a.gguf"


def refusal(path: Path, wanted: Contents = CONTENTS) -> str:
    with pytest.raises(UnusableContainerError) as caught:
        open_container(path, wanted)
    assert str(path) in caught.value.message
    assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED
    return caught.value.reason


def damaged_in(path: Path, contents: Contents) -> list[tuple[int, int]]:
    """The records that are not what was written."""
    with disk_of(path, contents) as disk:
        return [
            (layer, expert)
            for layer, spec in enumerate(contents.tensors)
            for expert in range(spec.num_experts)
            if disk.read(layer, expert, torch.empty(spec.layout.nbytes, dtype=torch.uint8)).exception(60)
        ]


def test_others_read_it_too_and_no_one_takes_it_for_a_model(file: Path) -> None:
    theirs = GGUFReader(file)
    for tensor, made, spec in zip(theirs.tensors, random_records(CONTENTS), CONTENTS.tensors, strict=True):
        assert tensor.name == spec.name
        assert tensor.data_offset % RECORD_ALIGNMENT == 0
        assert (torch.from_numpy(tensor.data.copy()).view(torch.uint8) == made).all()
    with pytest.raises(EngineError, match="open the model that they were made of"):
        read_gguf(file)


@pytest.mark.parametrize("left", [0, 3, 10, 200, 3000, CONTENTS.size - 1])
def test_cut_short(left: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:left])
    assert refusal(file) == "the file is damaged"


@given(at=st.integers(0, len(CONTENTS.header) - 1), bit=st.integers(0, 7))
def test_any_bit_of_the_header(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Flipped, it is noticed when the file is opened, unless it is padding that nobody reads."""
    path = tmp_path_factory.mktemp("flipped") / "a.gguf"
    write_records(path, CONTENTS)
    flip(path, at, bit)
    if at >= len(CONTENTS.header.rstrip(b"\0")) + 8:
        open_container(path, CONTENTS)
    elif at < len(CONTENTS.header.rstrip(b"\0")) - 8:
        refusal(path)


@given(
    at=st.integers(0, CONTENTS.nbytes - 1),
    bit=st.integers(0, 7),
)
def test_any_bit_of_a_record(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    contents = CONTENTS
    path = tmp_path_factory.mktemp("flipped") / "a.gguf"
    write_records(path, contents)
    offset = contents.offsets[0] + at
    flip(path, offset, bit)
    ((layer, expert),) = damaged_in(path, contents)
    begin = place_of(contents, layer, expert)
    assert begin <= offset < begin + contents.tensors[layer].layout.nbytes


_TURNED = RecordLayout(tuple(dataclasses.replace(part, transposed=True) for part in SMALL.parts), SMALL.nbytes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "int8"}, "in bf16 rather than int8"),
        ({"source": {"files": []}}, "has changed"),
        ({"tensors": contents_of([(6, SMALL), (5, LARGE)]).tensors}, "layers are not those"),
        ({"tensors": contents_of([(6, SMALL)] * 4).tensors}, "layers are not those"),
        ({"tensors": (dataclasses.replace(CONTENTS.tensors[0], layout=_TURNED),)}, "layers are not those"),
    ],
)
def test_not_what_is_wanted(change: dict[str, Any], reason: str, file: Path) -> None:
    assert reason in refusal(file, dataclasses.replace(CONTENTS, **change))


def test_another_version(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "VERSION", container.VERSION + 1)
    assert "another version of Switchyard" in refusal(file)


@pytest.mark.parametrize("damaged", [0, 2])
def test_only_what_is_damaged_is_made_again(damaged: int, file: Path) -> None:
    whole = file.read_bytes()
    flip(file, place_of(CONTENTS, damaged, 1) + 7)
    opened = open_container(file, CONTENTS)
    reopen(opened.damaged(f"layers.{damaged}.experts"))
    assert not file.exists()
    with ContainerWriter(file, CONTENTS) as writer:
        assert writer.finished == {0, 1, 2} - {damaged}
        writer.write(damaged, random_records(CONTENTS)[damaged], lambda _count: None)
        writer.finish()
    assert file.read_bytes() == whole
