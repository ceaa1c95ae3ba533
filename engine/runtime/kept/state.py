"""What layers hold that sum up what they have read: all of it at one position, in one piece of memory.

Recurrent layers and short convolutions cannot go back to an earlier token.  So what they hold is kept where a prompt or
an answer ends, and now and then within a long prompt.  Beside it lie the last tokens of the layers that keep all, those
behind the last whole block: a context goes on exactly where it was left.
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
from engine.kernels.native.paged_attention import PAGE_TOKENS, LayerPages, Piece, StatePages
from engine.runtime.kept.block import BLOCK_TOKENS, DTYPES, dtype_name
from engine.runtime.kept.files import Key
from engine.runtime.kv.paged_cache import PagedCaches, parts_of_pages

_MOST_LAYERS = 4096
_MOST_DIMENSIONS = 8
_CONVOLVED, _RECURRENT = "conv_states 0", "recurrent_states 0"
"""What the library calls them."""


def state_keys(before: Key, ids: Sequence[int]) -> Iterator[Key]:
    """The keys of what is held after each of less than a block of tokens, from none on, behind a prefix."""
    begun = hashlib.blake2b(before + b"state", digest_size=16)
    yield begun.digest()
    for token in ids:
        begun.update(array("q", (token,)).tobytes())
        yield begun.copy().digest()


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of it."""
        return int(math.prod(self.shape) * DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What each layer holds after `tokens` tokens."""

    tokens: int
    layers: tuple[tuple[HeldTensor, ...], ...]

    @classmethod
    def of(cls, held: PagedState) -> StateLayout:
        """That of what is held."""
        return cls(
            held.tokens,
            tuple(
                tuple(HeldTensor(name, tuple(each.shape), dtype_name(each.dtype)) for name, each in tensors)
                for tensors in held.layers()
            ),
        )

    @classmethod
    def read(cls, description: bytes) -> StateLayout | None:
        """What `described` wrote; None if it is of no use."""
        try:
            tokens, layers = json.loads(description)
            found = cls(
                int(tokens),
                tuple(
                    tuple(HeldTensor(str(name), tuple(map(int, shape)), dtype) for name, shape, dtype in tensors)
                    for tensors in layers
                ),
            )
        except (ValueError, TypeError, RecursionError):
            return None
        return found if found.is_sound else None

    @property
    def described(self) -> bytes:
        """As bytes."""
        plain = [[[part.name, part.shape, part.dtype] for part in each] for each in self.layers]
        return json.dumps([self.tokens, plain], separators=(",", ":")).encode()

    @property
    def is_sound(self) -> bool:
        """Whether all of it can be."""
        tensors = [part for layer in self.layers for part in layer]
        return (
            self.tokens > 0
            and 0 < len(self.layers) <= _MOST_LAYERS
            and all(len(part.shape) <= _MOST_DIMENSIONS and part.dtype in DTYPES for part in tensors)
            and all(each > 0 for part in tensors for each in part.shape)
        )

    @property
    def nbytes(self) -> int:
        """Of all of it; each tensor begins at a line of the processor's cache."""
        return sum(round_up(part.nbytes, PART_ALIGNMENT) for layer in self.layers for part in layer)

    def parts(self, data: torch.Tensor) -> list[list[torch.Tensor]]:
        """The tensors of each layer in these bytes."""
        offset, found = 0, []
        for layer in self.layers:
            mine = []
            for part in layer:
                mine.append(data[offset : offset + part.nbytes].view(DTYPES[part.dtype]).view(part.shape))
                offset += round_up(part.nbytes, PART_ALIGNMENT)
            found.append(mine)
        return found


class PagedState:
    """What layers have summed up of a sequence over pages after `tokens` tokens.

    Args:
        caches: of the pages.
        pages: those of the sequence, and `state` that of what its layers have summed up of these tokens.
    """

    def __init__(self, caches: PagedCaches, pages: torch.Tensor, tokens: int, state: int) -> None:
        self.tokens, self._caches, self._state = tokens, caches, state
        block = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._pages = pages[block // PAGE_TOKENS : -(-tokens // PAGE_TOKENS)].long()
        self._rest = tokens - block

    def layers(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The tensors of each layer by their names."""
        # Looked at anew each time: on a card pages may lie elsewhere by now, and nothing is to keep their old memory.
        for paged in self._caches.layers:
            if isinstance(paged, StatePages):
                both = ((_CONVOLVED, paged.recent), (_RECURRENT, paged.states))
                yield [(name, part[self._state][None]) for name, part in both if part.numel()]
                continue
            # By pages, which lie together: [pages, H, tokens, ...] -> [H, tokens, ...].
            parts = (
                [part[self._pages].transpose(0, 1).flatten(1, 2) for part in parts_of_pages(paged)]
                if self._rest
                else []
            )
            yield [(f"rows {index}", part[:, : self._rest]) for index, part in enumerate(parts)]

    def copy(self, data: torch.Tensor) -> None:
        """Into bytes of its layout."""
        for tensors, parts in zip(self.layers(), StateLayout.of(self).parts(data), strict=True):
            for (_name, source), target in zip(tensors, parts, strict=True):
                target.copy_(source)


def restore_pages(layers: Sequence[LayerPages], piece: Piece, layout: StateLayout, data: torch.Tensor) -> None:
    """Writes what was kept to the page of the state that a piece goes on to, and the last rows to its pages.

    Raises:
        LookupError: it is of another cache.
    """
    if len(layout.layers) != len(layers):
        raise LookupError("the cache has other layers")
    numbers = torch.arange(layout.tokens // BLOCK_TOKENS * BLOCK_TOKENS, layout.tokens)
    pages, rows = piece.pages[numbers // PAGE_TOKENS].long(), numbers % PAGE_TOKENS
    for paged, layer, parts in zip(layers, layout.layers, layout.parts(data), strict=True):
        if isinstance(paged, StatePages):
            named = {part.name: each[0] for part, each in zip(layer, parts, strict=True)}
            both = {_CONVOLVED: paged.recent, _RECURRENT: paged.states}
            targets = {at: part for at, part in both.items() if part.numel()}
            if named.keys() != targets.keys() or any(named[at].shape != targets[at].shape[1:] for at in targets):
                raise LookupError("a layer of another kind")
            for at, target in targets.items():
                target[piece.next_state].copy_(named[at])
        else:
            own = parts_of_pages(paged) if len(numbers) else []
            if [(part.dtype, part.shape[1], *part.shape[3:]) for part in own] != [
                (each.dtype, each.shape[0], *each.shape[2:]) for each in parts
            ]:
                raise LookupError("a layer of another kind")
            for target, source in zip(own, parts, strict=True):
                target[pages, :, rows] = source.transpose(0, 1).to(target.device)
