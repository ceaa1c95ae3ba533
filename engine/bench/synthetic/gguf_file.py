"""Synthetic models as GGUF files: quantised by llama.cpp itself, so that its own mix of types can be measured.

`synthetic:NAME?layers=4&gguf=Q4_K_M` on a bench's command line: made once, by llama.cpp's quantiser, then found again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from engine.bench.gguf_texts import texts_of
from engine.bench.peers.peer import FILE_TYPES, PeerError, quantise
from engine.bench.synthetic import parse, plain_nbytes, write_checkpoint
from engine.checkpoint.gguf.export import Quantisation, write_gguf
from engine.checkpoint.staging import staging_folder
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir

_FORMAT = 1
"""Part of the file's name: increase it when the content for a shape and type changes."""


def make_synthetic_gguf(model: str, kind: str, say: Callable[[str], None] = lambda _text: None) -> Path:
    """The GGUF file of a synthetic model, in the cache folder, created if missing; what it is made of is deleted.

    Args:
        model: as in `make_synthetic`.
        kind: llama.cpp's name of the mix of types, such as "Q4_K_M".
        say: called with progress messages.

    Raises:
        EngineError: as `make_synthetic` and `write_gguf`; also `INVALID_REQUEST` for an unknown type, and
            `DEVICE_UNAVAILABLE` if llama.cpp is not built or cannot write it.
    """
    if kind not in FILE_TYPES:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"llama.cpp writes no GGUF files of type {kind!r}: try Q4_K_M.")
    name, shape = parse(model)
    file = cache_dir() / "gguf" / f"{name}-v{_FORMAT}-{kind}.gguf"
    if file.is_file():
        return file
    nbytes = plain_nbytes(shape)
    with disk_errors_explained(file.parent), staging_folder(file.parent) as staged:
        require_space(file.parent, 3 * nbytes)
        checkpoint, plain, made = staged / "checkpoint", staged / "plain.gguf", staged / file.name
        checkpoint.mkdir()
        say(f"making {name} with random weights: {nbytes / 1e9:.1f} GB, deleted later")
        write_checkpoint(checkpoint, shape)
        say("writing them to a GGUF file, deleted later as well")
        write_gguf(checkpoint, plain, Quantisation.BF16, vocabulary=texts_of(checkpoint))
        say(f"quantising it to {kind} with llama.cpp: {file}, cached")
        try:
            quantise(plain, made, kind)
        except PeerError as failure:
            raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, f"There is no {file.name}: {failure}.") from failure
        with made.open("rb+") as written:
            os.fsync(written.fileno())
        made.replace(file)
    return file
