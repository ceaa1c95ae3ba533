"""Every architecture of GGUF files that is read, by llama.cpp's name."""

from __future__ import annotations

from engine.families.gguf import (
    Gguf,
    dbrx,
    deepseek,
    deepseek4,
    delta,
    gemma,
    gpt_oss,
    granite,
    kda,
    llama4,
    mamba,
    phi,
    rows,
)

_FILES = (rows, dbrx, deepseek, deepseek4, delta, gemma, gpt_oss, granite, kda, llama4, mamba, phi)

GGUF: dict[str, tuple[Gguf, ...]] = {}
"""An architecture -> the families that have it."""
for _row in sorted((row for file in _FILES for row in file.ROWS), key=lambda row: row.architecture):
    GGUF[_row.architecture] = (*GGUF.get(_row.architecture, ()), _row)

_BY_MODEL_TYPE: dict[str, Gguf] = {}
for _row in (row for file in _FILES for row in file.ROWS):
    _BY_MODEL_TYPE.setdefault(_row.model_type, _row)


def gguf_of(model_type: str) -> Gguf | None:
    """How models of this transformers `model_type` are written, if they are; in the first of several ways."""
    return _BY_MODEL_TYPE.get(model_type)
