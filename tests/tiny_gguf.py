"""Small GGUF files, as the `gguf` package writes them."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize
from numpy.typing import NDArray

from benchmarks.shapes import random_blocks
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import read_safetensors
from engine.formats.ggml import GGML
from tests.k_quants import quantise_k


def write_gguf(
    file: Path,
    tensors: Mapping[str, NDArray[Any]],
    *,
    architecture: str = "llama",
    keys: Callable[[GGUFWriter], None] = lambda _writer: None,
    types: Mapping[str, str] | None = None,
    **options: Any,
) -> Path:
    """A GGUF file with these tensors, float32, or of the type in `types` (ggml's name).

    Args:
        keys: adds metadata to the writer.
        options: of the writer (`split_max_tensors`, `endianess`).
    """
    writer = GGUFWriter(file, architecture, **options)
    keys(writer)
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            plain = np.ascontiguousarray(values, np.float32)
            writer.add_tensor(name, _in_blocks(plain, kind), raw_dtype=_type(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _type(kind: str) -> GGMLQuantizationType:
    if kind in GGMLQuantizationType.__members__:
        return GGMLQuantizationType[kind]
    unknown = int.__new__(GGMLQuantizationType, GGML[kind].id)  # to the package, that is
    unknown._name_, unknown._value_ = kind, GGML[kind].id
    GGML_QUANT_SIZES.setdefault(unknown, (GGML[kind].elements, GGML[kind].nbytes))
    return unknown


def _in_blocks(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Values in blocks; others of about their size where nothing here quantises to them."""
    if kind in ("Q4_K", "Q6_K"):
        return quantise_k(values, kind)
    with suppress(NotImplementedError, KeyError):
        return np.asarray(quantize(values, _type(kind)))
    own = GGML[kind]
    raw = random_blocks(own, values.size // own.elements, float(values.std()), seed=values.size)
    return raw.reshape(*values.shape[:-1], -1)


HIDDEN, WIDTH, EXPERTS = 16, 12, 4
KEYS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 100,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDTH,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
}
TENSORS = {
    "token_embd.weight": (10, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate_inp.weight": (EXPERTS, HIDDEN),
    "blk.0.ffn_gate_exps.weight": (EXPERTS, WIDTH, HIDDEN),
    "blk.0.ffn_up_exps.weight": (EXPERTS, WIDTH, HIDDEN),
    "blk.0.ffn_down_exps.weight": (EXPERTS, HIDDEN, WIDTH),
}


def write_mixtral(
    file: Path,
    keys: Mapping[str, Any] = KEYS,
    general: Mapping[str, Any] | None = None,
    more: Callable[[GGUFWriter], None] = lambda _writer: None,
) -> Path:
    """A Mixtral of one layer and a few kilobytes, without a tokenizer.

    Args:
        keys: of its architecture.
        general: others, by their whole names.
        more: adds further ones.
    """

    def add(writer: GGUFWriter) -> None:
        whole = {f"llama.{name}": value for name, value in keys.items()} | dict(general or {})
        for name, value in whole.items():
            kind = GGUFValueType.UINT64 if type(value) is int and value >= 2**31 else GGUFValueType.get_type(value)
            writer.add_key_value(name, value, kind, GGUFValueType.INT32 if isinstance(value, list) else None)
        more(writer)

    return write_gguf(file, {name: np.ones(shape) for name, shape in TENSORS.items()}, keys=add)


def dequantised(entry: TensorEntry) -> NDArray[np.float32]:
    """What the `gguf` package says of a tensor."""
    kind = _type(entry.dtype)
    raw = np.fromfile(entry.file, np.uint8, entry.nbytes, offset=entry.offset)
    shape = quant_shape_to_byte_shape(entry.shape, kind)
    return np.asarray(dequantize(raw.reshape(shape), kind).reshape(entry.shape), np.float32)


_ARCHITECTURES = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
_PAIRWISE = ("llama",)
"""Architectures that rotate adjacent pairs: queries and keys are reordered, as llama.cpp's converter does."""
_EXPERT = re.compile(r"(.*\.(?:v_)?experts)\.(\d+)\.(.*)")


def write_model(
    folder: Path,
    file: Path,
    architecture: str,
    *,
    quantised: str | Callable[[str], str] = "",
    tensors: Mapping[str, NDArray[Any]] | None = None,
    tokens: int | None = None,
    split_max_tensors: int = 0,
    name: str = "",
    unheard: Mapping[str, str] | None = None,
    **more: Any,
) -> Path:
    """A GGUF file of a tiny checkpoint in `folder`, with names by the `gguf` package's own table.

    Args:
        quantised: ggml's type of all matrices that it can hold, or that of each by its name in the file; else
            everything is float32.
        tensors: more of them, by their names in the file.
        tokens: in the vocabulary, if not as many as there are embeddings.
        split_max_tensors: of one part.
        name: `general.name`, if any.
        unheard: names in a layer -> the file's, of an architecture that the package has not heard of: others are as in
            dots1.
        more: metadata beside those of llama.cpp's converter, by key without the architecture's name.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = _ARCHITECTURES["dots1" if unheard else architecture]
    names = get_tensor_name_map(known, config["num_hidden_layers"])
    written: dict[str, NDArray[Any]] = dict(tensors or {})
    for key, values in _stacked(_checkpoint(folder)).items():
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", key)
        own = (unheard or {}).get(layer[2]) if layer is not None else None
        found = f"blk.{layer[1]}.{own}" if layer and own else names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert found is not None, key
        written[found] = _as_written(architecture, found, values, config)
    wanted = {name: quantised if isinstance(quantised, str) else quantised(name) for name in written}
    types = {name: kind for name, kind in wanted.items() if kind and takes(kind, name, written[name])}

    def keys(writer: GGUFWriter) -> None:
        if name:
            writer.add_name(name)
        _add_hyperparameters(writer, config)
        for key, value in more.items():
            writer.add_key_value(f"{architecture}.{key}", value, GGUFValueType.get_type(value))
        add_vocabulary(writer, folder, tokens or config["vocab_size"])

    return write_gguf(
        file, written, architecture=architecture, keys=keys, types=types, split_max_tensors=split_max_tensors
    )


def _checkpoint(folder: Path) -> dict[str, NDArray[Any]]:
    return {
        name: values for file in sorted(folder.glob("*.safetensors")) for name, values in read_safetensors(file).items()
    }


def _stacked(checkpoint: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    stacks: dict[str, dict[int, NDArray[Any]]] = {}
    tensors: dict[str, NDArray[Any]] = {}
    for name, values in checkpoint.items():
        expert = _EXPERT.match(name)
        if expert is None:
            tensors[name] = values
        else:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = values
    return tensors | {name: np.stack([of[at] for at in range(len(of))]) for name, of in stacks.items()}


def _as_written(architecture: str, name: str, values: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config.get("num_key_value_heads")}.get(
        name.split(".")[-2]
    )
    if heads and architecture in _PAIRWISE:
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values[0] if name.endswith("ffn_gate_inp_shexp.weight") else values


def takes(kind: str, name: str, values: NDArray[Any]) -> bool:
    """Whether a tensor can be of a type, and is one that llama.cpp would quantise."""
    return values.ndim > 1 and values.shape[-1] % GGML[kind].elements == 0 and "ffn_gate_inp" not in name


def _add_hyperparameters(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config["rope_parameters"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def add_vocabulary(writer: GGUFWriter, folder: Path, size: int) -> None:
    """The checkpoint's byte-level BPE, as llama.cpp's converter writes it."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for token, index in content["model"]["vocab"].items():
        if index >= size:
            continue
        tokens[index], types[index] = token, int(TokenType.NORMAL)
    for added in content["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    )
    for role, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token = settings.get(f"{role}_token")
        if token is not None:
            add(tokens.index(token))
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text(encoding="utf-8"))
