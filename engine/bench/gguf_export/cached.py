"""The GGUF file of a checkpoint, cached until the checkpoint changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from engine.bench.gguf_export.quantisation import Quantisation
from engine.bench.gguf_export.writing import write_gguf
from engine.checkpoint.shards import fingerprint, read_tensors
from engine.checkpoint.staging import staging_folder
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir

_FORMAT = 1
"""Part of the file's name: increase it when the output for a checkpoint changes."""


def gguf_of(checkpoint: Path, quantisation: Quantisation, say: Callable[[str], None] = lambda _text: None) -> Path:
    """The GGUF file with this checkpoint's weights, in the cache folder, written if missing.

    Args:
        say: called with progress messages.

    Raises:
        EngineError: as `write_gguf`, and `DISK_FULL`.
    """
    tensors = read_tensors(checkpoint)
    made_of = json.dumps([_FORMAT, fingerprint(checkpoint, tensors.values())], sort_keys=True)
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    folder = cache_dir() / "gguf"
    path = folder / f"{checkpoint.name}-{digest}-{quantisation.value}.gguf"
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
        write_gguf(checkpoint, staged / path.name, quantisation, on_progress)
        (staged / path.name).replace(path)
    return path
