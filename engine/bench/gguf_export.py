"""Writes GGUF files from a checkpoint's weights, so that a peer that reads GGUF runs the same model.

A file is written tensor by tensor, with at most one layer's experts of one kind in memory, and cached until the
checkpoint changes. Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `ggml-quants.c`; encoded by
the `gguf` package, whose results are those of llama.cpp's own reference functions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from numpy.typing import NDArray

from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf.names import gguf_at
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.safetensors_numpy import from_bfloat16
from engine.checkpoint.shards import fingerprint, read_tensors
from engine.checkpoint.staging import staging_folder
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir

Bytes = NDArray[np.uint8]

_DTYPES: dict[str, Any] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


class Quantisation(Enum):
    """The types of the matrices of a file; Q8_0, Q4_0 and Q4_1 scale groups of 32 numbers along a row."""

    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"

    @property
    def tensor_type(self) -> GGMLQuantizationType:
        """The type of one tensor in a GGUF file."""
        return GGMLQuantizationType[self.value]

    @property
    def file_type(self) -> LlamaFileType:
        """The type of the file as a whole."""
        return LlamaFileType[f"MOSTLY_{self.value}"]

    def type_for(self, row: int) -> GGMLQuantizationType:
        """The type of a matrix with rows of `row` elements: bfloat16 if groups do not divide it."""
        group, _nbytes = GGML_QUANT_SIZES[self.tensor_type]
        return self.tensor_type if row % group == 0 else GGMLQuantizationType.BF16


def byte_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    """The shape of the encoded bytes of a tensor of `shape`."""
    group, nbytes = GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // group * nbytes)


def encoded(entry: TensorEntry, kind: GGMLQuantizationType, rotary_heads: int = 0) -> Bytes:
    """A tensor of a checkpoint, uint8 [.., bytes of a row].

    Args:
        rotary_heads: if not 0, the rows of each of these heads are reordered from transformers' rotary layout (first
            half against second) to that of llama.cpp's "llama" architecture (adjacent pairs).

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if the tensor is neither bfloat16 nor float16 nor float32.
    """
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{entry.key} is {entry.dtype}, which is not written to GGUF: use a bf16 model.",
        )
    values: NDArray[Any] = np.memmap(entry.file, dtype, "r", entry.offset, entry.shape)
    if rotary_heads:
        rows = entry.shape[0]
        halves = values.reshape(rotary_heads, 2, rows // rotary_heads // 2, *entry.shape[1:])
        values = halves.swapaxes(1, 2).reshape(entry.shape)
    if entry.dtype == "BF16":
        if kind is GGMLQuantizationType.BF16:
            return np.ascontiguousarray(values).view(np.uint8)
        values = from_bfloat16(values)
    numbers = np.ascontiguousarray(values, dtype=np.float32)
    return np.ascontiguousarray(quantize(numbers, kind)).view(np.uint8)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the GGUF file.

    Attributes:
        name: its name in the file.
        shape: its shape, outermost dimension first.
        sources: the checkpoint's tensors; several are stacked along a new first dimension.
        is_matrix: whether it is quantised; norms and routers stay float32, as llama.cpp requires.
        rotary_heads: how many heads' rows are reordered (see `quantisation.encoded`); 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorEntry, ...]
    is_matrix: bool
    rotary_heads: int = 0


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How a transformers `model_type` is written.

    Attributes:
        architecture: llama.cpp's name.
        reorders_rotary: whether the architecture rotates adjacent pairs, so that q and k are reordered.
        block: the checkpoint's name of the sparse block ("" for a dense feed-forward network).
        experts: the checkpoint's names of gate, up and down.
        expert_width: key of `config.json` with the width of an expert.
        renormalises: whether llama.cpp's graph normalises the selected experts' weights.
    """

    architecture: str
    reorders_rotary: bool
    block: str
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    expert_width: str = "intermediate_size"
    renormalises: bool = True


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", True, ""),
    "mixtral": GgufFamily("llama", True, "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": GgufFamily("qwen3moe", False, "mlp", expert_width="moe_intermediate_size"),
    "olmoe": GgufFamily("olmoe", False, "mlp", renormalises=False),
}

_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


def gguf_family_of(config: Mapping[str, Any]) -> GgufFamily:
    """The family of a `config.json`.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if it is unsupported here, or has a part that llama.cpp ignores.
    """
    kind = config["model_type"]
    family = FAMILIES.get(kind)
    if family is None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED, f"Models of type {kind} are not written to GGUF: {', '.join(FAMILIES)} are."
        )
    rope = config.get("rope_parameters") or {}
    sum_to_one = config.get("norm_topk_prob", family.renormalises)
    differs = {
        "rope_type": rope.get("rope_type", "default") != "default" or bool(config.get("rope_scaling")),
        "sliding_window": bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True)),
        "clip_qkv": config.get("clip_qkv") is not None,
        "mlp_only_layers": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        "norm_topk_prob": sum_to_one != family.renormalises,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
    }
    for key, off in differs.items():
        if off:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"This model's {key} is not written to GGUF, so llama.cpp cannot run it."
            )
    return family


def add_hyperparameters(writer: GGUFWriter, family: GgufFamily, config: Mapping[str, Any]) -> None:
    """Writes the architecture's keys."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope_theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta", 10000.0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if family.block:
        writer.add_expert_count(expert_count(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config[family.expert_width])


def add_bare_ids(writer: GGUFWriter) -> None:
    """Writes a vocabulary of ids without texts, which is all that the benches' peers need."""
    writer.add_tokenizer_model("no_vocab")


def expert_count(config: Mapping[str, Any]) -> int:
    """Routed experts of a layer."""
    count: int = config.get("num_local_experts") or config["num_experts"]
    return count


def gguf_tensors(
    family: GgufFamily, config: Mapping[str, Any], checkpoint: Mapping[str, TensorEntry]
) -> Iterator[GgufTensor]:
    """Every tensor of the file, in its order.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if the checkpoint has an unsupported tensor, or lacks one.
    """
    left = dict(checkpoint)

    def take(name: str) -> TensorEntry:
        try:
            return left.pop(name)
        except KeyError as error:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"The checkpoint has no {name}, so it cannot be written to GGUF."
            ) from error

    def single(name: str, source: str, *, is_matrix: bool, rotary_heads: int = 0) -> GgufTensor:
        entry = take(f"{source}.weight")
        return GgufTensor(f"{name}.weight", entry.shape, (entry,), is_matrix, rotary_heads)

    yield single("token_embd", "model.embed_tokens", is_matrix=True)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        for source, name in _NORMS.items():
            if f"{theirs}{source}.weight" in left:
                yield single(ours + name, theirs + source, is_matrix=False)
        for source, name in _ATTENTION.items():
            reordered = (heads.get(source) or 0) if family.reorders_rotary else 0
            yield single(ours + name, f"{theirs}self_attn.{source}", is_matrix=True, rotary_heads=reordered)
        if not family.block:
            for source, name in zip(family.experts, _FEED_FORWARD, strict=True):
                yield single(ours + name, f"{theirs}mlp.{source}", is_matrix=True)
            continue
        block = theirs + family.block
        yield single(f"{ours}ffn_gate_inp", f"{block}.gate", is_matrix=False)
        for source, name in zip(family.experts, _FEED_FORWARD, strict=True):
            stack = tuple(take(f"{block}.experts.{expert}.{source}.weight") for expert in range(expert_count(config)))
            yield GgufTensor(f"{ours}{name}_exps.weight", (len(stack), *stack[0].shape), stack, True)
    yield single("output_norm", "model.norm", is_matrix=False)
    if "lm_head.weight" in left and config.get("tie_word_embeddings", False):
        del left["lm_head.weight"]
    if "lm_head.weight" in left:
        yield single("output", "lm_head", is_matrix=True)
    if left:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{min(left)} has no place in a GGUF file of this family: llama.cpp cannot run it.",
        )


def write_gguf(
    checkpoint: Path,
    target: Path,
    quantisation: Quantisation,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    add_vocabulary: Callable[[GGUFWriter], None] = add_bare_ids,
) -> None:
    """Writes the checkpoint directory's weights to `target`, not atomic, but flushed: the caller renames it.

    All matrices have the same type, including embedding and head; norms and routers are float32.

    Args:
        add_vocabulary: writes the tokenizer's keys.
        on_progress: called with bytes written and total bytes.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`, `CHECKPOINT_DAMAGED`.
        OSError: if the file cannot be written.
    """
    config = read_config(checkpoint)
    family = gguf_family_of(config)
    tensors = list(gguf_tensors(family, config, read_tensors(checkpoint)))
    types = [_type_of(tensor, quantisation) for tensor in tensors]
    writer = GGUFWriter(target, family.architecture)
    with contextlib.closing(writer):
        writer.add_file_type(quantisation.file_type)
        writer.add_quantization_version(2)
        add_hyperparameters(writer, family, config)
        add_vocabulary(writer)
        total = 0
        for tensor, kind in zip(tensors, types, strict=True):
            shape = byte_shape(tensor.shape, kind)
            nbytes = int(np.prod(shape))
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), nbytes, kind)
            total += nbytes
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor, kind in zip(tensors, types, strict=True):
            content = _content(tensor, kind)
            writer.write_tensor_data(content)
            done += content.nbytes
            on_progress(done, total)
        writer.flush()
    with target.open("r+b") as file:
        os.fsync(file.fileno())


def _type_of(tensor: GgufTensor, quantisation: Quantisation) -> GGMLQuantizationType:
    return quantisation.type_for(tensor.shape[-1]) if tensor.is_matrix else GGMLQuantizationType.F32


def _content(tensor: GgufTensor, kind: GGMLQuantizationType) -> Bytes:
    if len(tensor.shape) == len(tensor.sources[0].shape):
        return encoded(tensor.sources[0], kind, tensor.rotary_heads)
    stack = np.empty(byte_shape(tensor.shape, kind), np.uint8)
    for place, source in zip(stack, tensor.sources, strict=True):
        place[...] = encoded(source, kind)
    return stack


_FORMAT = 1
"""Part of the file's name: increase it when the output for a checkpoint changes."""


def gguf_of(
    checkpoint: Path,
    quantisation: Quantisation,
    say: Callable[[str], None] = lambda _text: None,
    vocabulary: tuple[str, Callable[[GGUFWriter], None]] = ("", add_bare_ids),
) -> Path:
    """The GGUF file with this checkpoint's weights, in the cache folder, written if missing; a GGUF file is its own.

    Args:
        say: called with progress messages.
        vocabulary: what writes the tokenizer's keys, and its name in that of the file.

    Raises:
        EngineError: as `write_gguf`, and `DISK_FULL`.
    """
    own = gguf_at(checkpoint)
    if own is not None:
        return own
    tensors = read_tensors(checkpoint)
    made_of = json.dumps([_FORMAT, fingerprint(checkpoint)], sort_keys=True)
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    folder = cache_dir() / "gguf"
    name, add_vocabulary = vocabulary
    path = folder / f"{checkpoint.name}{name}-{digest}-{quantisation.value}.gguf"
    if path.is_file():
        return path
    say(f"writing {path}, kept for the next time")
    tenths = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal tenths
        if 10 * done // total > tenths:
            tenths = 10 * done // total
            say(f"{10 * tenths}% of {total / 1e9:.1f} GB")

    with disk_errors_explained(folder), staging_folder(folder) as staged:
        # The checkpoint's size bounds the file's, except for float32 norms.
        require_space(folder, sum(entry.nbytes for entry in tensors.values()))
        write_gguf(checkpoint, staged / path.name, quantisation, on_progress, add_vocabulary)
        (staged / path.name).replace(path)
    return path
