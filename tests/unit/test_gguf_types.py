"""The number formats of GGUF files, against the `gguf` package's own reading of random blocks."""

from collections.abc import Callable

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from benchmarks.shapes import random_blocks
from engine.checkpoint.gguf.file import unread_type
from engine.formats.ggml import BLOCK_TYPES, GGML, BlockType

_ROWS, _BLOCKS = 5, 40


def _random(kind: BlockType, seed: int) -> np.ndarray:
    """Random bytes as rows of blocks, some with scales that are no numbers."""
    return np.random.default_rng(seed).integers(0, 256, (_ROWS, _BLOCKS * kind.nbytes), np.uint8)


def _by_bits(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """As ggml-quants.c has it, which the package has not: a half, and then codes of so many bits."""

    def values(raw: np.ndarray) -> np.ndarray:
        blocks = raw.reshape(-1, 18)
        codes = np.stack([blocks[:, 2:] >> at & 2**bits - 1 for at in range(0, 8, bits)], -1).reshape(len(blocks), -1)
        weights = 2 * codes.astype(np.float32) - 1 if bits == 1 else codes.astype(np.float32) - 1
        return (weights * np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)).reshape(len(raw), -1)

    return values


_OWN = {"Q1_0": _by_bits(1), "Q2_0": _by_bits(2)}


def test_a_type_has_the_size_that_the_gguf_package_knows() -> None:
    for name, kind in GGML.items():
        if name not in _OWN:
            theirs = GGMLQuantizationType(kind.id)
            assert (theirs.name, *GGML_QUANT_SIZES[theirs]) == (name, kind.elements, kind.nbytes)


@pytest.mark.parametrize("name", [name for name, kind in GGML.items() if kind.split is not None or not kind.is_blocks])
def test_a_type_that_is_taken_apart_has_the_numbers_of_the_gguf_package(name: str) -> None:
    kind = GGML[name]
    for seed in range(4):
        raw = _random(kind, seed)
        with np.errstate(all="ignore"):
            expected = _OWN[name](raw) if name in _OWN else dequantize(raw, GGMLQuantizationType(kind.id))
        np.testing.assert_array_equal(kind.dequantise(raw), expected)


def test_a_scale_that_is_no_half_can_be_put() -> None:
    for kind in BLOCK_TYPES.values():
        if kind.put is not None:
            raw, wanted = _random(kind, 3).reshape(-1, kind.nbytes), np.float32(0.0625)
            kind.put(raw, np.full(len(raw), wanted))
            scales = np.abs(kind.dequantise(raw)).max(-1)
            assert (scales > wanted / 20).all()
            assert (scales < wanted * 200).all()


@pytest.mark.parametrize("name", GGML)
def test_random_blocks_of_any_type_stand_for_numbers_of_about_the_deviation(name: str) -> None:
    kind = GGML[name]
    raw = random_blocks(kind, 40, 0.25)
    assert raw.shape == (40, kind.nbytes)
    assert 0.1 < kind.dequantise(raw).std() < 0.6


def test_every_type_of_the_package_is_read_or_known_by_name() -> None:
    for kind in GGMLQuantizationType:
        read = BLOCK_TYPES.get(int(kind))
        assert kind.name == (read.name if read is not None else unread_type(int(kind)))
