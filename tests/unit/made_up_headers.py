"""Tensor entries of checkpoints that are nowhere: what headers say, without files."""

import math
from collections.abc import Iterable
from pathlib import Path

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.synthetic import TensorSpec


def entries_of(files: Iterable[list[TensorSpec]]) -> list[TensorEntry]:
    """The entries of all files' tensors, in bf16."""
    return [
        TensorEntry(Path(f"{number}.safetensors"), spec.name, "BF16", tuple(spec.shape), 0, 2 * math.prod(spec.shape))
        for number, specs in enumerate(files)
        for spec in specs
    ]
