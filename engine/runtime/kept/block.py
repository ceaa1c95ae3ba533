"""A block: keys and values of a few tokens of one sequence, of all layers, in one piece of memory.

The same bytes lie in RAM and on disk, so keeping and bringing back are copies.  What a block looks like is written
beside it.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.common.footprint import PART_ALIGNMENT, round_up
from engine.kernels.native.paged_attention import PAGE_TOKENS, LayerPages
from engine.runtime.kept.files import Key
from engine.runtime.kv.paged_cache import parts_of_pages

BLOCK_TOKENS = 2 * PAGE_TOKENS
"""Few enough that little of a prompt is read again, and enough for a file of each block to be worth its name."""

_MOST_LAYERS = 4096


def block_keys(root: Key, ids: Sequence[int], tokens: int) -> Iterator[Key]:
    """The keys of all whole blocks of the first `tokens` tokens: each says what all tokens up to its end are."""
    before = root
    for end in range(BLOCK_TOKENS, tokens + 1, BLOCK_TOKENS):
        content = array("q", ids[end - BLOCK_TOKENS : end]).tobytes()
        before = hashlib.blake2b(before + content, digest_size=16).digest()
        yield before


@dataclass(frozen=True, slots=True)
class PartShape:
    """Keys, values, or the scales of either: [heads, tokens, *width]."""

    heads: int
    width: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of a block."""
        return int(self.heads * BLOCK_TOKENS * math.prod(self.width) * DTYPES[self.dtype].itemsize)


DTYPES = {
    name: getattr(torch, name)
    for name in ("bfloat16", "float16", "float32", "float64", "int8", "int64", "float8_e4m3fn")
    if hasattr(torch, name)
}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What each layer has in a block; one that keeps nothing has no parts."""

    layers: tuple[tuple[PartShape, ...], ...]

    @classmethod
    def of_pages(cls, layers: Sequence[LayerPages | None]) -> BlockLayout:
        """That of pages."""
        return cls(tuple(tuple(_of_page(part) for part in parts_of_pages(each)) for each in layers))

    @classmethod
    def read(cls, description: bytes) -> BlockLayout | None:
        """What `described` wrote; None if it is of no use."""
        try:
            layers: list[tuple[PartShape, ...]] = []
            for count, parts in json.loads(description):
                shapes = tuple(PartShape(int(heads), tuple(map(int, width)), dtype) for heads, width, dtype in parts)
                if not 0 < count <= _MOST_LAYERS - len(layers):
                    return None
                layers += [shapes] * count
        except (ValueError, TypeError, RecursionError):
            return None
        found = cls(tuple(layers))
        return found if found.is_sound else None

    @property
    def described(self) -> bytes:
        """As bytes, equal layers together."""
        runs: list[tuple[int, tuple[PartShape, ...]]] = []
        for parts in self.layers:
            if runs and runs[-1][1] == parts:
                runs[-1] = runs[-1][0] + 1, parts
            else:
                runs.append((1, parts))
        plain = [[count, [[part.heads, part.width, part.dtype] for part in parts]] for count, parts in runs]
        return json.dumps(plain, separators=(",", ":")).encode()

    @property
    def is_sound(self) -> bool:
        """Whether all of it can be."""
        parts = [part for layer in self.layers for part in layer]
        return all(
            part.heads > 0 and len(part.width) <= 1 and all(each > 0 for each in part.width) and part.dtype in DTYPES
            for part in parts
        )

    @property
    def nbytes(self) -> int:
        """Of a block; each part begins at a line of the processor's cache."""
        return sum(round_up(part.nbytes, PART_ALIGNMENT) for layer in self.layers for part in layer)

    def parts(self, block: torch.Tensor) -> list[list[torch.Tensor]]:
        """The parts [heads, BLOCK_TOKENS, *width] of each layer in the bytes of a block."""
        offset, found = 0, []
        for layer in self.layers:
            mine = []
            for part in layer:
                piece = block[offset : offset + part.nbytes].view(DTYPES[part.dtype])
                mine.append(piece.view(part.heads, BLOCK_TOKENS, *part.width))
                offset += round_up(part.nbytes, PART_ALIGNMENT)
            found.append(mine)
        return found


def _of_page(part: torch.Tensor) -> PartShape:
    return PartShape(part.shape[1], tuple(part.shape[3:]), dtype_name(part.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """What a dtype is called in descriptions."""
    return str(dtype).removeprefix("torch.")
