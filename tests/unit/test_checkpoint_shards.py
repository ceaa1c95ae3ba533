from __future__ import annotations

import contextlib
import json
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoint.config_file import read_config, text_part
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.shards import check_filled, read_tensors
from engine.common.errors import EngineError, ErrorCode
from tests.refusals import refused
from tests.tiny_gguf import write_gguf
from tests.unit.checkpoint_files import header_of, write_config, write_safetensors

INDEX = "model.safetensors.index.json"


def refusal(call: Any, folder: Path) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call(folder)
    assert caught.value.message.endswith(".")
    return caught.value


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for number, name in ((1, "a"), (2, "b")):
        write_safetensors(tmp_path / f"model-0000{number}-of-00002.safetensors", header_of({name: ("F32", [2])}))
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def test_one_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", header_of({"a": ("F32", [2])}))
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps({}))
    assert list(read_tensors(tmp_path)) == ["a"]


def test_shards_with_and_without_index(sharded: Path) -> None:
    assert set(read_tensors(sharded)) == {"a", "b"}
    (sharded / INDEX).unlink()
    assert set(read_tensors(sharded)) == {"a", "b"}


def test_shard_missing(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    error = refusal(read_tensors, sharded)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "model-00002-of-00002.safetensors" in error.message
    (sharded / INDEX).unlink()
    assert "number 2 is missing" in refusal(read_tensors, sharded).message


@pytest.mark.parametrize("keep", [0, 20])
def test_shard_empty_or_cut_short(sharded: Path, keep: int) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    error = refusal(read_tensors, sharded)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert shard.name in error.message


def test_index_naming_an_absent_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    error = refusal(read_tensors, sharded)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "c" in error.message


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", ""])
def test_index_naming_a_file_elsewhere(sharded: Path, name: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert refusal(read_tensors, sharded).code is ErrorCode.CHECKPOINT_DAMAGED


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    error = refusal(read_tensors, sharded)
    assert error.code is ErrorCode.CHECKPOINT_DAMAGED
    assert INDEX in error.message


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_safetensors(tmp_path / f"{name}.safetensors", header_of({"a": ("F32", [2])}))
    assert refusal(read_tensors, tmp_path).code is ErrorCode.CHECKPOINT_DAMAGED


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "model.PKL"])
def test_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps({"a": 1}))
    error = refusal(read_tensors, tmp_path)
    assert error.code is ErrorCode.CHECKPOINT_UNSAFE
    assert name in error.message


def test_index_that_leads_to_pickle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    assert refusal(read_tensors, tmp_path).code is ErrorCode.CHECKPOINT_UNSAFE


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "weight_packed"])
def test_gptq_and_awq(tmp_path: Path, suffix: str) -> None:
    key = f"model.layers.0.mlp.experts.0.gate_proj.{suffix}"
    write_safetensors(tmp_path / "model.safetensors", header_of({key: ("I32", [2])}))
    assert refusal(read_tensors, tmp_path).code is ErrorCode.MODEL_UNSUPPORTED


def test_a_broken_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for call, place in ((read_tensors, tmp_path), (read_config, file)):
        assert refusal(call, place).code is ErrorCode.CHECKPOINT_DAMAGED


def test_empty_folder(tmp_path: Path) -> None:
    assert refusal(read_tensors, tmp_path).code is ErrorCode.CHECKPOINT_DAMAGED


def test_config(tmp_path: Path) -> None:
    write_config(tmp_path, hidden_size=3)
    assert read_config(tmp_path)["hidden_size"] == 3


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, ErrorCode.CHECKPOINT_DAMAGED),
        ("", ErrorCode.CHECKPOINT_DAMAGED),
        ("[1]", ErrorCode.CHECKPOINT_DAMAGED),
        ("{", ErrorCode.CHECKPOINT_DAMAGED),
        ("{}", ErrorCode.MODEL_UNSUPPORTED),
        ('{"model_type": 7}', ErrorCode.MODEL_UNSUPPORTED),
    ],
)
def test_broken_config(tmp_path: Path, content: str | None, code: ErrorCode) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    error = refusal(read_config, tmp_path)
    assert error.code is code
    assert "config.json" in error.message


def test_no_such_folder(tmp_path: Path) -> None:
    assert refusal(read_config, tmp_path / "absent").code is ErrorCode.MODEL_NOT_FOUND


def test_text_part_of_a_multimodal_config() -> None:
    assert text_part({"thinker_config": {"text_config": {"hidden_size": 5}}}) == {"hidden_size": 5}


@pytest.mark.parametrize(("filled", "is_whole"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_file_of_full_size_whose_end_is_empty_is_still_being_downloaded(
    tmp_path: Path, filled: int, is_whole: bool
) -> None:
    """Two matrices and a vector; the part that another program has written ends within them."""
    file, size = tmp_path / "model.safetensors", 2**20
    shapes = {"a": [1024, 512], "b": [1024, 512], "norm": [4096]}
    begins = [0, size, 2 * size, 2 * size + 8192]
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [begins[at], begins[at + 1]]}
            for at, (name, shape) in enumerate(shapes.items())
        }
    ).encode()
    data = b"\1" * begins[filled] + bytes(begins[3] - begins[filled])
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    tensors = read_tensors(tmp_path).values()
    if is_whole:
        check_filled(tensors)
    else:
        with pytest.raises(EngineError) as caught:
            check_filled(tensors)
        assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
def test_blocks_that_are_no_numbers_are_named(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(1)
    names = [f"blk.{index}.attn_q.weight" for index in range(3)]
    types = {} if kind == "F32" else dict.fromkeys(names, kind)
    file = write_gguf(tmp_path / "a.gguf", {name: random.normal(size=(8, 256)) for name in names}, types=types)
    entries = list(read_gguf(file).tensors.values())
    check_filled(entries)
    content = file.read_bytes()
    for entry in entries:
        broken = b"\xff" * entry.nbytes
        file.write_bytes(content[: entry.offset] + broken + content[entry.offset + entry.nbytes :])
        with refused(ErrorCode.CHECKPOINT_DAMAGED, str(file), entry.key):
            check_filled(entries)


@pytest.mark.parametrize(
    ("dtype", "weight", "is_whole"),
    [
        *(("F32", struct.pack("<f", math.nan), False), ("F32", struct.pack("<f", -math.inf), True)),
        *(("BF16", b"\xc0\x7f", False), ("F8_E4M3", b"\xff", False), ("F8_E4M3", b"\x7e", True), ("U8", b"\xff", True)),
    ],
)
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, dtype: str, weight: bytes, is_whole: bool) -> None:
    """An infinity may be a mask's."""
    header = json.dumps({"a.weight": {"dtype": dtype, "shape": [64], "data_offsets": [0, 64 * len(weight)]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + 64 * weight)
    with contextlib.nullcontext() if is_whole else refused(ErrorCode.CHECKPOINT_DAMAGED, "a.weight"):
        check_filled(read_tensors(tmp_path).values())
