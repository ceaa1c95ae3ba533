"""Keeps GGUF files of checkpoints, so that a peer that reads GGUF runs the same model, until the checkpoint changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.gguf.export import Metadata, Quantisation, write_gguf
from engine.checkpoint.gguf.names import gguf_at
from engine.checkpoint.shards import fingerprint, read_tensors
from engine.checkpoint.staging import staging_folder
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir

_FORMAT = 2
"""Part of the file's name: increase it when the output for a checkpoint changes."""


def gguf_of(
    checkpoint: Path,
    quantisation: Quantisation,
    say: Callable[[str], None] = lambda _text: None,
    vocabulary: tuple[str, Metadata | None] = ("", None),
) -> Path:
    """The GGUF file with this checkpoint's weights, in the cache folder, written if missing; a GGUF file is its own.

    Args:
        say: called with progress messages.
        vocabulary: a name of the tokenizer's keys, in that of the file, and these keys; else ids without texts.

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
    name, keys = vocabulary
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
        write_gguf(checkpoint, staged / path.name, quantisation, on_progress, keys)
        (staged / path.name).replace(path)
    return path
