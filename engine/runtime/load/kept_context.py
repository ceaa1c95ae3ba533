"""What is kept of prompts and answers of one loaded model: whose it is, and how much of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers.cache_utils import DummyLayer

from engine.common.kept_context import kept_context_dir
from engine.runtime.kept.files import KeptFiles, Key
from engine.runtime.kept.prefixes import KeptPrefixes
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.layers import new_cache
from engine.runtime.kv.narrow import NarrowLayer
from engine.runtime.kv.reuse import can_continue, exact_tokens, long_rope_boundary
from engine.runtime.loaded_model import LoadedModel

_OF_MODELS = (".safetensors", ".gguf", ".bin", ".pt", "config.json")
_RAM_SHARE = 8
"""One part in so many of what is free once the model is there, or of what its budget leaves."""
_RAM_BESIDE_DISK = 128 * 2**20
"""The most where experts are read from disk into all of the RAM that there is."""


def open_kept(loaded: LoadedModel) -> KeptPrefixes | None:
    """What is kept for a model; None if nothing can be: see `why_not_kept`."""
    if why_not_kept(loaded.model):
        return None
    boundary = long_rope_boundary(loaded.model) or sys.maxsize
    kept = KeptPrefixes(
        _root(loaded),
        _ram_bytes(loaded),
        KeptFiles(kept_context_dir()),
        min(exact_tokens(loaded.model), boundary),
    )
    kept.note = kept_note(loaded.model)
    return kept


def why_not_kept(model: Any) -> str:
    """Why nothing that this model reads is kept for other chats, as a sentence; empty if it is."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "What this model reads is not kept: it reads each prompt in one go."
    cache = new_cache(model)
    known = (GrowingLayer, NarrowLayer, GrowingWindowLayer, DummyLayer)
    if cache is None or not all(type(layer) in known for layer in cache.layers) or not can_continue(model):
        return (
            "What this model reads is not kept for other chats: some of its layers sum up what they have read, and "
            "cannot go back."
        )
    return ""


def kept_note(model: Any) -> str:
    """What of its contexts is not kept, as a sentence for people; empty if all of them are."""
    why = why_not_kept(model)
    if why:
        return why
    cache = new_cache(model)
    layers = cache.layers if cache is not None else []
    windows = [layer.sliding_window for layer in layers if type(layer) is GrowingWindowLayer]
    if not windows:
        return ""
    return (
        f"Of chats longer than {min(windows):,} tokens nothing more is kept for later: some layers of this model "
        "forget what lies further back."
    )


def _root(loaded: LoadedModel) -> Key:
    """Says by which model, and how, something was computed: the files of weights by their names, sizes and times."""
    info = loaded.info
    described = [
        _files(Path(info.path)),
        loaded.model.config.to_json_string(),
        [info.precision, str(loaded.model.dtype), str(loaded.kv_type), info.device, loaded.kernels is not None],
        [transformers.__version__, torch.__version__, _version()],
    ]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).digest()


def _files(path: Path) -> list[list[Any]]:
    if path == Path() or not path.exists():
        return [["", os.getpid(), id(path)]]  # of no other model, and of no other process
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.name.endswith(_OF_MODELS)]
    return sorted([file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files)


def _version() -> str:
    try:
        return importlib.metadata.version("switchyard")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ram_bytes(loaded: LoadedModel) -> int:
    free = psutil.virtual_memory().available
    if loaded.ram_bytes is not None:
        weights = loaded.info.weights_bytes if loaded.devices is None else 0
        free = min(free, loaded.ram_bytes - loaded.info.experts_bytes - weights)
    share = max(0, free) // _RAM_SHARE
    return min(share, _RAM_BESIDE_DISK) if loaded.disk_backed is not None else share
