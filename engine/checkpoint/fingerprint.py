"""The state of a checkpoint when something was derived from it, to detect changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import CONFIG_NAME, MAX_CONFIG_BYTES
from engine.checkpoint.headers import MAX_HEADER, TensorEntry
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign_file import open_foreign, reason


def fingerprint(directory: Path, tensors: Iterable[TensorEntry]) -> dict[str, Any]:
    """Names, sizes and times of these tensors' files, and a digest of their headers and of config.json.

    Weights are not read: that would take as long as the work that the fingerprint saves.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`, naming the file that cannot be read.
    """
    digest = hashlib.sha256()
    described = []
    tensors = list(tensors)
    for file in [directory / CONFIG_NAME, *sorted({entry.file for entry in tensors})]:
        try:
            with open_foreign(file) as stream:
                status = os.fstat(stream.fileno())
                if file.suffix == ".safetensors":
                    length = stream.read(8)
                    digest.update(length + stream.read(min(int.from_bytes(length, "little"), MAX_HEADER)))
                else:
                    digest.update(stream.read(MAX_CONFIG_BYTES))
        except OSError as error:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"{file} cannot be read ({reason(error)}): check the disk, or download the model again.",
            ) from error
        described.append([file.name, status.st_size, status.st_mtime_ns])
    return {"files": described, "headers": digest.hexdigest()}
