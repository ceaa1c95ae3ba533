"""Headers of checkpoints, in one file and in shards, and the profile that they give."""

import contextlib
import json
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.headers import TensorEntry, read_header
from engine.checkpoint.profile import kv_of_model, read_profile, stretched_context
from engine.checkpoint.shards import check_filled, read_tensors
from engine.common.errors import EngineError, ErrorCode
from tests.refusals import refused
from tests.tiny_gguf import write_gguf
from tests.unit.checkpoint_files import header_of, write_config, write_safetensors

TENSORS = {"a": ("BF16", [2, 3]), "b": ("F32", [4]), "empty": ("F32", [0]), "scalar": ("F32", [])}


def damage(file: Path) -> str:
    with pytest.raises(EngineError) as caught:
        read_header(file)
    assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED
    assert file.name in caught.value.message
    return caught.value.message


def entries_or_damage(file: Path) -> dict[str, TensorEntry]:
    try:
        return read_header(file)
    except EngineError:
        damage(file)
        return {}


def test_reads_names_types_shapes_and_places(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, **header_of(TENSORS)})
    entries = read_header(file)
    assert list(entries) == ["a", "b", "empty", "scalar"]
    assert (entries["a"].dtype, entries["a"].shape, entries["a"].nbytes, entries["a"].numel) == ("BF16", (2, 3), 12, 6)
    assert entries["b"].offset == entries["a"].offset + 12
    assert entries["scalar"].offset + 4 == file.stat().st_size


def test_cut_short_in_data_and_in_header(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", header_of(TENSORS))
    whole = file.read_bytes()
    for length in (len(whole) - 1, 30):
        file.write_bytes(whole[:length])
        assert "cut short" in damage(file)


def test_surplus_bytes(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", header_of(TENSORS), data_bytes=100)
    assert f"{file} is 68 bytes" in damage(file)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "NOPE"},
        {"shape": [2, -3]},
        {"shape": [2, 4]},
        {"shape": "23"},
        {"shape": [2, 3.0]},
        {"data_offsets": [0]},
        {"data_offsets": [4, 16]},
        {"data_offsets": [12, 0]},
        {"data_offsets": [True, 12]},
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, wrong: dict[str, object]) -> None:
    header = header_of(TENSORS)
    header["a"] |= wrong
    damage(write_safetensors(tmp_path / "x.safetensors", header, data_bytes=28))


def test_a_name_twice(tmp_path: Path) -> None:
    raw = b'{"a": 1, "a": 2}'
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    damage(file)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_header_is_found_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    """Whatever bit flips, reading ends in our error or in tensors that lie within the file."""
    file = write_safetensors(tmp_path_factory.mktemp("flip") / "x.safetensors", header_of(TENSORS))
    raw = bytearray(file.read_bytes())
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    raw[place % header_bytes] ^= 1 << bit
    file.write_bytes(raw)
    entries = entries_or_damage(file)
    assert all(entry.offset + entry.nbytes <= len(raw) for entry in entries.values())


@given(data=st.binary(max_size=200))
def test_random_bytes_never_cause_anything_but_our_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("noise") / "x.safetensors"
    file.write_bytes(data)
    entries_or_damage(file)


MIXTRAL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def expert_tensors(prefix: str) -> dict[str, tuple[str, list[int]]]:
    return {
        f"{prefix}.experts.{expert}.{part}.weight": ("BF16", [8, 4]) for expert in (0, 1) for part in ("w1", "w2", "w3")
    }


def test_moe_profile(tmp_path: Path) -> None:
    write_config(tmp_path, **MIXTRAL)
    tensors = {
        "model.embed_tokens.weight": ("BF16", [10, 8]),
        **expert_tensors("model.layers.0.block_sparse_moe"),
        "model.layers.0.shared_experts.up.weight": ("BF16", [8, 4]),
    }
    write_safetensors(tmp_path / "model.safetensors", header_of(tensors))
    profile = read_profile(tmp_path)
    assert (profile.family, profile.layers, profile.hidden) == ("mixtral", 1, 8)
    assert (profile.experts, profile.experts_per_token, profile.context_tokens) == (2, 1, 64)
    assert profile.expert_parameters == 6 * 32
    assert profile.expert_bytes == 2 * 6 * 32
    assert profile.parameters == 80 + 7 * 32
    assert profile.bytes == 2 * profile.parameters
    assert profile.kv.numbers == 2 * 4
    assert (profile.dtype, profile.quantization) == ("bfloat16", "")


def test_quantised_parameters_are_counted_unpacked(tmp_path: Path) -> None:
    write_config(tmp_path, **MIXTRAL, quantization_config={"quant_method": "mxfp4"})
    tensors = {
        "model.layers.0.mlp.experts.down_proj_blocks": ("U8", [2, 8, 1, 16]),
        "model.layers.0.mlp.experts.down_proj_scales": ("U8", [2, 8, 1]),
        "model.layers.0.self_attn.q_proj.weight": ("F8_E4M3", [8, 8]),
        "model.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", [1, 1]),
    }
    write_safetensors(tmp_path / "model.safetensors", header_of(tensors))
    profile = read_profile(tmp_path)
    assert profile.quantization == "mxfp4"
    assert profile.expert_parameters == 2 * 8 * 32
    assert profile.parameters == 2 * 8 * 32 + 64


def test_kv_of_latent_attention_and_of_linear_layers() -> None:
    latent = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    assert kv_of_model(latent).numbers == 3 * (16 + 4)
    hybrid = {**MIXTRAL, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    assert kv_of_model(hybrid).numbers == 2 * 4
    nemotron = {  # a letter for each layer, of which two sum up and one attends
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "MEM*-",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
    }
    assert kv_of_model(nemotron).numbers == 2 * 2 * 128
    assert kv_of_model(nemotron).state_bytes == 2 * 4 * ((64 * 64 + 2 * 8 * 128) * 4 + 64 * 64 * 128)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 100),
        ({"rope_parameters": None}, 100),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 400),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 1e4}}, 100),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 1000.0}}, 100),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80}}, 320),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 400),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}}, 100),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 800}}, 100),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1]}, "original_max_position_embeddings": 10}, 100),
        ({"rope_scaling": {"type": "longrope", "factor": 32}, "original_max_position_embeddings": 10}, 320),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 80}}, 100),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 100),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "4"}}, 100),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            320,
        ),
    ],
)
def test_a_context_is_as_long_as_the_rotary_embedding_stretches_it(config: dict[str, object], tokens: int) -> None:
    assert stretched_context(config, 100) == tokens


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
        with refused(ErrorCode.CHECKPOINT_DAMAGED):
            check_filled(tensors)


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


def test_who_can_wait_finds_what_a_short_look_does_not(tmp_path: Path) -> None:
    """A stretch of a tensor that is none of the 256 looked at, and a matrix that nobody has filled."""
    names = [f"blk.{index}.attn_q.weight" for index in range(300)]
    tensors = {name: np.ones((8, 256), np.float32) for name in names} | {"a.weight": np.zeros((1024, 512), np.float32)}
    file = write_gguf(tmp_path / "a.gguf", tensors | {"b.weight": np.ones((1024, 512), np.float32)})
    entries = list(read_gguf(file).tensors.values())
    check_filled(entries)
    with refused(ErrorCode.CHECKPOINT_DAMAGED, str(file), "nothing but zeros in", "a.weight"):
        check_filled(entries, thorough=True)
    content, one = bytearray(file.read_bytes()), entries[1]
    content[one.offset : one.offset + 4096] = b"\xff" * 4096
    file.write_bytes(content)
    check_filled(entries)
    with refused(ErrorCode.CHECKPOINT_DAMAGED, str(file), one.key):
        check_filled(entries, thorough=True)


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
