"""The number formats of GGUF files, against the `gguf` package's own reading of random blocks."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.checkpoint.gguf.types import BLOCK_TYPES, BY_NAME, BlockType, unread_type

_ROWS, _BLOCKS = 5, 40


def _random(kind: BlockType, seed: int) -> np.ndarray:
    """Random bytes as rows of blocks, some with scales that are no numbers."""
    return np.random.default_rng(seed).integers(0, 256, (_ROWS, _BLOCKS * kind.nbytes), np.uint8)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_type_has_the_numbers_of_the_gguf_package(name: str) -> None:
    kind = BY_NAME[name]
    theirs = GGMLQuantizationType(kind.id)
    assert theirs.name == name
    assert GGML_QUANT_SIZES[theirs] == (kind.elements, kind.nbytes)
    for seed in range(4):
        raw = _random(kind, seed)
        with np.errstate(all="ignore"):
            expected = dequantize(raw, theirs)
        np.testing.assert_array_equal(kind.dequantise(raw), expected)


def test_any_leading_dimensions_are_kept() -> None:
    kind = BY_NAME["Q4_K"]
    raw = _random(kind, 1)[:4]
    stacked = kind.dequantise(raw.reshape(2, 2, -1))
    assert stacked.shape == (2, 2, _BLOCKS * 256)
    np.testing.assert_array_equal(stacked.reshape(4, -1), kind.dequantise(raw))


def test_every_type_of_the_package_is_read_or_known_by_name() -> None:
    for kind in GGMLQuantizationType:
        read = BLOCK_TYPES.get(int(kind))
        assert kind.name == (read.name if read is not None else unread_type(int(kind)))
