"""Every architecture of GGUF files that is read, by llama.cpp's name."""

from __future__ import annotations

from engine.families.family import FILLS_IN
from engine.families.gguf import Gguf, deepseek, odd, recurrent, rows

_FILES = (rows, odd, deepseek, recurrent)
_ROWS = [row for file in _FILES for row in file.ROWS]

REFUSED = dict.fromkeys(("diffusion-gemma", "dream", "llada", "llada-moe", "rnd1"), FILLS_IN)
"""Architectures that cannot run -> why, completing "it ..."."""
GGUF: dict[str, tuple[Gguf, ...]] = {
    architecture: tuple(row for row in _ROWS if row.architecture == architecture)
    for architecture in sorted({row.architecture for row in _ROWS})
}
"""An architecture -> the families that have it."""

_BY_MODEL_TYPE = {row.model_type: row for row in reversed(_ROWS)}


def gguf_of(model_type: str) -> Gguf | None:
    """How models of this transformers `model_type` are written, if they are; in the first of several ways."""
    return _BY_MODEL_TYPE.get(model_type)
