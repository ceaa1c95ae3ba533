"""What is kept lies in one piece of memory, the same bytes in RAM and on disk: a block of a few tokens of all layers,
or a state, what layers hold behind some tokens.  What it looks like is written beside it.

Recurrent layers and short convolutions cannot go back to an earlier token.  So their state is kept where a prompt or an
answer ends, and now and then within a long prompt.  Beside it lie the last tokens of the layers that keep all, those
behind the last whole block: a context goes on exactly where it was left.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from engine.common.footprint import PART_ALIGNMENT, round_up
from engine.kernels.native.paged_attention import PAGE_TOKENS, LayerPages, Piece, StatePages
from engine.runtime.kv.paged_cache import PagedCaches, parts_of_pages
from engine.runtime.prefix_cache.files import Key

if TYPE_CHECKING:
    from engine.runtime.prefix_cache.store import Found

BLOCK_TOKENS = 2 * PAGE_TOKENS
"""Few enough that little of a prompt is read again, and enough for a file of each block to be worth its name."""
_PAGES = BLOCK_TOKENS // PAGE_TOKENS
_MOST_LAYERS, _MOST_DIMENSIONS = 4096, 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.float8_e4m3fn),
    )
}

CopyBlock = Callable[[int, torch.Tensor], None]
"""Copies the block with this index into these bytes."""


def block_keys(root: Key, ids: Sequence[int], tokens: int) -> Iterator[Key]:
    """The keys of all whole blocks of the first `tokens` tokens: each says what all tokens up to its end are."""
    before = root
    for end in range(BLOCK_TOKENS, tokens + 1, BLOCK_TOKENS):
        content = array("q", ids[end - BLOCK_TOKENS : end]).tobytes()
        before = hashlib.blake2b(before + content, digest_size=16).digest()
        yield before


def state_keys(before: Key, ids: Sequence[int]) -> Iterator[Key]:
    """The keys of states behind each of less than a block of tokens, from none on, behind a prefix."""
    begun = hashlib.blake2b(before + b"state", digest_size=16)
    yield begun.digest()
    for token in ids:
        begun.update(array("q", (token,)).tobytes())
        yield begun.copy().digest()


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer: keys, values, the scales of either, [heads, tokens, ...], or of what it sums up."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.shape) * _DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What each layer has in a piece; one that keeps nothing has no parts.

    Attributes:
        tokens: that a state is behind; 0 of a block.
    """

    tokens: int
    layers: tuple[tuple[Part, ...], ...]

    @classmethod
    def of(cls, layers: Sequence[LayerPages | None], tokens: int = 0) -> BlockLayout:
        """That of blocks of these pages, or of a state behind so many tokens."""

        def parts(paged: LayerPages | None) -> Iterator[Part]:
            shapes: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
            if isinstance(paged, StatePages):
                shapes = {name: (part, part.shape[1:]) for name, part in _states(paged).items() if tokens}
            elif rows := tokens % BLOCK_TOKENS if tokens else BLOCK_TOKENS:
                rest = enumerate(parts_of_pages(paged))
                shapes = {f"rows {at}": (part, (part.shape[1], rows, *part.shape[3:])) for at, part in rest}
            for name, (part, shape) in shapes.items():
                yield Part(name, tuple(shape), str(part.dtype).removeprefix("torch."))

        return cls(tokens, tuple(tuple(parts(each)) for each in layers))

    @classmethod
    def read(cls, description: bytes) -> BlockLayout | None:
        """What `described` wrote; None if it is of no use."""
        try:
            tokens, runs = json.loads(description)
            layers: list[tuple[Part, ...]] = []
            for count, parts in runs:
                if not 0 < count <= _MOST_LAYERS - len(layers):
                    return None
                layers += [
                    tuple(Part(str(name), tuple(map(int, shape)), dtype) for name, shape, dtype in parts)
                ] * count
            found = cls(int(tokens), tuple(layers))
            return found if found._is_sound else None
        except (ValueError, TypeError, RecursionError):
            return None

    @property
    def described(self) -> bytes:
        """As bytes, equal layers together."""
        runs = [
            (len([*same]), [[each.name, each.shape, each.dtype] for each in parts])
            for parts, same in groupby(self.layers)
        ]
        return json.dumps([self.tokens, runs], separators=(",", ":")).encode()

    @property
    def _is_sound(self) -> bool:
        parts = [part for layer in self.layers for part in layer]
        return (
            self.tokens >= 0
            and bool(self.layers)
            and all(len(part.shape) <= _MOST_DIMENSIONS and part.dtype in _DTYPES for part in parts)
            and all(each > 0 for part in parts for each in part.shape)
        )

    @property
    def nbytes(self) -> int:
        """Of a piece; each part begins at a line of the processor's cache."""
        return sum(round_up(part.nbytes, PART_ALIGNMENT) for layer in self.layers for part in layer)

    def parts(self, data: torch.Tensor) -> list[list[torch.Tensor]]:
        offset, found = 0, []
        for layer in self.layers:
            mine = []
            for part in layer:
                mine.append(data[offset : offset + part.nbytes].view(_DTYPES[part.dtype]).view(part.shape))
                offset += round_up(part.nbytes, PART_ALIGNMENT)
            found.append(mine)
        return found


def _states(paged: StatePages) -> dict[str, torch.Tensor]:
    both = {"recent": paged.recent, "states": paged.states}
    return {name: part for name, part in both.items() if part.numel()}


def _alike(
    layout: BlockLayout, data: torch.Tensor, layers: Sequence[LayerPages | None], pages: Sequence[int], state: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a piece holds, and where these pages and this state hold the same; nothing of pages below 0."""
    # Pages are looked at when they are copied: on a card they may lie elsewhere by now, and nothing is to keep their
    # old memory.
    for paged, parts in zip(layers, layout.parts(data), strict=True):
        if isinstance(paged, StatePages):
            yield from ((here, there[state]) for here, there in zip(parts, _states(paged).values(), strict=False))
            continue
        for here, there in zip(parts, parts_of_pages(paged), strict=False):
            for page, rows in zip(pages, torch.split(here, PAGE_TOKENS, dim=1), strict=False):
                if page >= 0:
                    yield rows, there[page][:, : rows.shape[1]]


def from_pages(
    layers: Sequence[LayerPages | None], places: Sequence[int] | Mapping[int, int], layout: BlockLayout
) -> CopyBlock:
    def copy(index: int, data: torch.Tensor) -> None:
        own = [places[place] for place in range(index * _PAGES, (index + 1) * _PAGES)]
        for here, there in _alike(layout, data, layers, own):
            here.copy_(there)

    return copy


class PagedState:
    """The state of a sequence over pages behind `tokens` tokens.

    Args:
        pages: those of the sequence, and `state` that of what its layers have summed up of these tokens.
    """

    def __init__(self, caches: PagedCaches, pages: torch.Tensor, tokens: int, state: int) -> None:
        self.layout, self._caches, self._state = BlockLayout.of(caches.layers, tokens), caches, state
        self._pages = pages[tokens // BLOCK_TOKENS * _PAGES : -(-tokens // PAGE_TOKENS)].tolist()

    def copy(self, data: torch.Tensor) -> None:
        for here, there in _alike(self.layout, data, self._caches.layers, self._pages, self._state):
            here.copy_(there)


def state_into_pages(found: Found, layers: Sequence[LayerPages], piece: Piece) -> bool:
    """Writes what was found, of which a sequence holds some, to its pages and to the state that it goes on to.

    Returns:
        Whether all of it is sound, and of these layers: else nothing of it is of use.
    """
    assert found.state is not None
    layout = found.state[1]
    if layout != BlockLayout.of(layers, layout.tokens) or (found.keys and found.layout != BlockLayout.of(layers)):
        return False
    blocks, places = len(found.keys) * BLOCK_TOKENS, piece.pages.tolist()
    if found.keys and into_pages(found, layers, piece.pages, min(piece.held, blocks)) < blocks:
        return False

    def take(data: torch.Tensor) -> None:
        own = places[layout.tokens // BLOCK_TOKENS * _PAGES :]
        for here, there in _alike(layout, data, layers, own, piece.next_state):
            there.copy_(here)

    return found.bring_state(take)


def into_pages(found: Found, layers: Sequence[LayerPages | None], pages: torch.Tensor, held: int) -> int:
    """Writes what was found behind the first `held` tokens, which end a page; returns the tokens that are there now."""
    places = [page if place >= held // PAGE_TOKENS else -1 for place, page in enumerate(pages.tolist())]

    def take(index: int, data: torch.Tensor) -> None:
        block_into_pages(data, found.layout, layers, places[index * _PAGES : (index + 1) * _PAGES])

    return max(held, found.bring(held // BLOCK_TOKENS, take))


def block_into_pages(
    data: torch.Tensor, layout: BlockLayout, layers: Sequence[LayerPages | None], pages: Sequence[int]
) -> None:
    """Writes a block to its pages; to none where one is below 0."""
    for here, there in _alike(layout, data, layers, pages):
        there.copy_(here)
