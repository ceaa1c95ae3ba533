"""What is kept of prompts and answers of one loaded model: whose it is, and how much of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import secrets
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.cache_utils import DummyLayer, DynamicLayer

from engine.checkpoint.shards import fingerprint
from engine.common.errors import EngineError
from engine.common.kept_context import kept_context_dir
from engine.devices.host_memory import available_ram
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.paged_cache import index_of, may_hold
from engine.runtime.kv.reuse import exact_tokens, long_rope_boundary
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prefix_cache.files import Key, SpillFiles
from engine.runtime.prefix_cache.store import PrefixCache

_RAM_SHARE = 8
"""One part in so many of what is free once the model is there, or of what its budget leaves."""
_RAM_BESIDE_DISK = 128 * 2**20
"""The most where experts are read from disk into all of the RAM that there is."""


def open_kept(loaded: LoadedModel) -> PrefixCache | None:
    if why_not_kept(loaded.model):
        return None
    boundary = long_rope_boundary(loaded.model) or sys.maxsize
    kept = PrefixCache(
        _root(loaded),
        _ram_bytes(loaded),
        SpillFiles(kept_context_dir()),
        min(exact_tokens(loaded.model), boundary),
    )
    kept.note = kept_note(loaded.model)
    return kept


def why_not_kept(model: Any) -> str:
    if getattr(model.config, "is_encoder_decoder", False):
        return "What this model reads is not kept: it reads each prompt in one go."
    if not may_hold(library_cache(model)):
        return (
            "What this model reads is not kept for other chats: some of its layers hold more than keys, values and "
            "sums of what they have read."
        )
    return ""


def kept_note(model: Any) -> str:
    why = why_not_kept(model)
    if why:
        return why
    cache: Any = library_cache(model)
    if all(type(each) in (DynamicLayer, DummyLayer) or index_of(each) is not None for each in cache.layers):
        return ""
    return (
        "Some layers of this model sum up or forget what lies further back: a chat is gone on with where one of its "
        "last answers began or ended, and what was changed before that is read again."
    )


def _root(loaded: LoadedModel) -> Key:
    info = loaded.info
    described = [
        _weights(Path(info.path)),
        loaded.model.config.to_json_string(),
        [info.precision, str(loaded.model.dtype), str(loaded.kv_type), info.device, loaded.kernels is not None],
        [transformers.__version__, torch.__version__, _version()],
    ]
    if loaded.sight is not None:
        described += [repr(loaded.sight.sizes), loaded.sight.key]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).digest()


def _weights(path: Path) -> Any:
    try:
        return fingerprint(path)
    except EngineError:
        return secrets.token_hex()  # of no other model, and of no other start


def _version() -> str:
    try:
        return importlib.metadata.version("switchyard")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ram_bytes(loaded: LoadedModel) -> int:
    free = available_ram()
    if loaded.ram_bytes is not None:
        weights = loaded.info.weights_bytes if loaded.devices is None else 0
        free = min(free, loaded.ram_bytes - loaded.info.experts_bytes - weights)
    share = max(0, free) // _RAM_SHARE
    return min(share, _RAM_BESIDE_DISK) if loaded.disk_backed is not None else share
