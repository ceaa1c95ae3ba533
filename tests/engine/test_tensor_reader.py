"""Tensors of a checkpoint into given memory: byte for byte, several at a time, and nothing is written to afterwards."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import packed
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.headers import TensorEntry, read_header
from engine.checkpoint.packed import PackedEntry, RotaryRows, Rows
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.file_image import FileImage
from engine.formats.ggml import GGML
from engine.runtime.load import tensor_reader
from engine.runtime.load.tensor_reader import LazyTensor, TensorReader, blocks_of, torch_dtype
from tests.engine.ggml_blocks import made_up_blocks
from tests.refusals import refused
from tests.tiny_gguf import dequantised, write_gguf

SHAPES = [(3, 5), (1,), (100, 37), (0, 4), (2, 1000, 3)]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.randn(shape).bfloat16() for number, shape in enumerate(SHAPES)}


@pytest.fixture
def entries(tensors: dict[str, torch.Tensor], tmp_path: Path) -> dict[str, TensorEntry]:
    save_file(tensors, tmp_path / "model.safetensors")
    return read_header(tmp_path / "model.safetensors")


def nothing(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("chunk", [100, 2**22])
def test_many_at_once(
    tensors: dict[str, torch.Tensor],
    entries: dict[str, TensorEntry],
    direct: bool,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_reader, "_CHUNK", chunk)
    total, told = sum(tensor.nbytes for tensor in tensors.values()), list[int]()
    before = threading.active_count()
    with TensorReader(lambda done, _: told.append(done), lambda: False, total, direct=direct) as reader:
        places = [(entries[name], torch.empty_like(tensor)) for name, tensor in tensors.items()]
        reader.read_into(places)
        for (entry, place), (name, tensor) in zip(places, tensors.items(), strict=True):
            assert torch.equal(place, tensor), name
            assert torch.equal(reader.read(entry), tensor)
        rows = [(entries["t4"].row(row), torch.empty(1000, 3).bfloat16()) for row in (1, 0)]
        reader.read_into(rows)
        assert all(torch.equal(place, tensors["t4"][1 - at]) for at, (_, place) in enumerate(rows))
    assert told == sorted(told)
    assert threading.active_count() == before


def test_cancelled_in_the_middle(entries: dict[str, TensorEntry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "_CHUNK", 64)
    asked = iter(range(1000))
    with TensorReader(nothing, lambda: next(asked) > 20, 1) as reader, pytest.raises(RequestCancelled):
        reader.read_into([(entries["t2"], torch.empty(100, 37).bfloat16())])


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_has_become_shorter(entries: dict[str, TensorEntry], direct: bool) -> None:
    file = entries["t2"].file
    file.write_bytes(file.read_bytes()[:-20])
    last = max(entries.values(), key=lambda entry: entry.offset + entry.nbytes * 2)
    with (
        TensorReader(nothing, lambda: False, 1, direct=direct) as reader,
        refused(ErrorCode.CHECKPOINT_DAMAGED, "cut short"),
    ):
        reader.read(last)


def test_a_file_that_is_gone(entries: dict[str, TensorEntry]) -> None:
    entries["t2"].file.unlink()
    with TensorReader(nothing, lambda: False, 1) as reader, pytest.raises(EngineError, match="cannot be read"):
        reader.read(entries["t2"])


def test_packed_tensors_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_AT_ONCE", 3 * 64)
    values = np.random.default_rng(0).standard_normal((8, 5, 64)).astype(np.float32)
    tensors = {"q": values, "f": values, "rows": values[:, 0]}
    file = write_gguf(tmp_path / "m.gguf", tensors, types={"q": "Q8_0", "rows": "Q4_0"})
    entries = read_gguf(file).tensors
    rows = entries["rows"]
    reordered = PackedEntry(file, "rows", "Q4_0", rows.shape, rows.offset, rows.nbytes, (rows,), RotaryRows(2))
    expected = {name: torch.from_numpy(dequantised(entries[name])) for name in entries}
    with TensorReader(nothing, lambda: False, 1, dtype=torch.float32) as reader:
        assert torch.equal(reader.read(entries["q"]), expected["q"])
        assert torch.equal(reader.read(entries["q"].row(3)), expected["q"][3:4])
        assert torch.equal(reader.read(entries["f"]), expected["f"])
        # Heads of four rows: 0, 2 | 1, 3 become 0, 1 | 2, 3.
        assert torch.equal(reader.read(reordered), expected["rows"][[0, 2, 1, 3, 4, 6, 5, 7]])
    with TensorReader(nothing, lambda: False, 1) as reader:
        assert torch.equal(reader.read(entries["q"]), expected["q"].bfloat16())
        assert torch.equal(reader.read(entries["f"]), expected["f"])
        lazy = LazyTensor(entries["q"], reader.read)
        assert (lazy.get_shape(), lazy.get_dtype(), lazy.is_floating_point()) == ([8, 5, 64], "BF16", True)
    assert torch_dtype(reordered) is None


def test_joined_matrices_wait_for_a_file_that_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied into one piece while the file is read, and were copied before it was there."""
    kind, path, asked = GGML["Q8_0"], tmp_path / "model.gguf", threading.Event()
    content = made_up_blocks(kind, 12, 2, 1).raw
    path.write_bytes(content.numpy().tobytes())
    nbytes = content.nbytes // 4
    parts = [
        TensorEntry(path, f"part {at}", "Q8_0", (rows, 64), begin * nbytes, rows // 3 * nbytes)
        for at, (begin, rows) in enumerate([(0, 3), (1, 9)])
    ]
    stored = blocks_of(PackedEntry.of("both", (12, 64), parts, Rows()))
    read, wait = FileImage._read_piece, FileImage.wait_for
    monkeypatch.setattr(FileImage, "_read_piece", lambda *args: (asked.wait(60), read(*args)))
    monkeypatch.setattr(FileImage, "wait_for", lambda *args: (asked.set(), wait(*args))[1])
    try:
        with TensorReader(nothing, lambda: False, 0, whole=[path]) as reader:
            assert stored is not None
            found = reader.blocks_of(stored)
    finally:
        asked.set()
        reader.close()
    assert torch.equal(found.raw, content)
    assert found.order is None
