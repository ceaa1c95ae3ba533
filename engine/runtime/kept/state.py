"""What layers hold that sum up what they have read, or forget it: all of it at one position, in one piece of memory.

Recurrent layers, short convolutions and sliding windows cannot go back to an earlier token.  So what they hold is kept
where a prompt or an answer ends, and now and then within a long prompt.  Beside it lie the last tokens of the layers
that keep all, those behind the last whole block: a context goes on exactly where it was left.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    DummyLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from engine.common.footprint import PART_ALIGNMENT, round_up
from engine.families.library import COMPRESSING
from engine.kernels.native.paged_attention import PAGE_TOKENS, LayerPages, Piece, StatePages
from engine.runtime.kept.block import BLOCK_TOKENS, DTYPES, dtype_name
from engine.runtime.kept.files import Key
from engine.runtime.kv.growing import GrowingWindowLayer
from engine.runtime.kv.layers import StateLayer
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.parts import held_parts, keeps_rows, make_rows, parts_of_pages

_STATES = (
    StateLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""The library's, by exact class."""
_MOST_LAYERS = 4096
_MOST_DIMENSIONS = 8
_Plain = bool | int | None
_CONVOLVED, _RECURRENT = "conv_states", "recurrent_states"
"""What the library calls them."""


def has_state(states: Any) -> bool:
    """Whether what a layer of this class holds can be kept, though it forgets tokens."""
    return type(states) is GrowingWindowLayer or _is_plain(states)


def _is_plain(states: Any) -> bool:
    """Whether all that a layer holds are tensors and plain values, some of them in dictionaries."""
    return type(states) in _STATES or type(states).__name__ in COMPRESSING


@dataclass(frozen=True, slots=True)
class CacheForm:
    """Of the caches of a model.

    Attributes:
        has_state: whether some layers forget tokens; `has_rows`: whether some do not, and have any.
    """

    has_state: bool
    has_rows: bool

    @classmethod
    def of(cls, cache: Any) -> CacheForm | None:
        """That of a new cache; None if what some layer holds cannot be kept."""
        layers = getattr(cache, "layers", [])
        if not layers or not all(keeps_rows(each) or has_state(each) for each in layers):
            return None
        rows = [each for each in layers if keeps_rows(each) and type(each) is not DummyLayer]
        return cls(any(has_state(each) for each in layers), bool(rows))


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
class LayerState:
    """What one layer holds: tensors, and plain values by their names."""

    tensors: tuple[HeldTensor, ...] = ()
    plain: tuple[tuple[str, _Plain], ...] = ()


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What each layer holds after `tokens` tokens."""

    tokens: int
    layers: tuple[LayerState, ...]

    @classmethod
    def of(cls, held: HeldState) -> StateLayout:
        """That of what is held."""
        return cls(
            held.tokens,
            tuple(
                LayerState(
                    tuple(HeldTensor(name, tuple(each.shape), dtype_name(each.dtype)) for name, each in tensors),
                    tuple(plain.items()),
                )
                for tensors, plain in held.layers()
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
                    LayerState(
                        tuple(HeldTensor(str(name), tuple(map(int, shape)), dtype) for name, shape, dtype in tensors),
                        tuple((str(name), value) for name, value in plain),
                    )
                    for tensors, plain in layers
                ),
            )
        except (ValueError, TypeError, RecursionError):
            return None
        return found if found.is_sound else None

    @property
    def described(self) -> bytes:
        """As bytes."""
        plain = [[[[part.name, part.shape, part.dtype] for part in each.tensors], each.plain] for each in self.layers]
        return json.dumps([self.tokens, plain], separators=(",", ":")).encode()

    @property
    def is_sound(self) -> bool:
        """Whether all of it can be."""
        tensors = [part for layer in self.layers for part in layer.tensors]
        values = [value for layer in self.layers for _name, value in layer.plain]
        return (
            self.tokens > 0
            and 0 < len(self.layers) <= _MOST_LAYERS
            and all(len(part.shape) <= _MOST_DIMENSIONS and part.dtype in DTYPES for part in tensors)
            and all(each > 0 for part in tensors for each in part.shape)
            and all(value is None or isinstance(value, bool | int) for value in values)
        )

    @property
    def nbytes(self) -> int:
        """Of all of it; each tensor begins at a line of the processor's cache."""
        return sum(round_up(part.nbytes, PART_ALIGNMENT) for layer in self.layers for part in layer.tensors)

    def parts(self, data: torch.Tensor) -> list[list[torch.Tensor]]:
        """The tensors of each layer in these bytes."""
        offset, found = 0, []
        for layer in self.layers:
            mine = []
            for part in layer.tensors:
                mine.append(data[offset : offset + part.nbytes].view(DTYPES[part.dtype]).view(part.shape))
                offset += round_up(part.nbytes, PART_ALIGNMENT)
            found.append(mine)
        return found


class HeldState:
    """What a cache held after `tokens` tokens.

    Args:
        cache: it holds these tokens, at least, in its layers that keep all.
        forgetful: the other layers as they were then, by their numbers; None for those of the cache, as they are now.
    """

    def __init__(self, cache: Any, tokens: int, forgetful: Mapping[int, Any] | None = None) -> None:
        self.tokens = tokens
        self._cache, self._forgetful = cache, forgetful

    def layers(self) -> Iterator[tuple[list[tuple[str, torch.Tensor]], dict[str, _Plain]]]:
        """The tensors of each layer by their names, and its plain values."""
        begin = self.tokens // BLOCK_TOKENS * BLOCK_TOKENS
        for number, states in enumerate(self._cache.layers):
            if keeps_rows(states):
                rows = [part[:, begin : self.tokens] for part in held_parts(states)] if self.tokens > begin else []
                yield [(f"rows {index}", part) for index, part in enumerate(rows)], {}
            else:
                yield _held_by(states if self._forgetful is None else self._forgetful[number])

    def copy(self, data: torch.Tensor) -> None:
        """Into bytes of its layout."""
        for (tensors, _plain), parts in zip(self.layers(), StateLayout.of(self).parts(data), strict=True):
            for (_name, source), target in zip(tensors, parts, strict=True):
                target.copy_(source)


class PagedState(HeldState):
    """The same of a sequence over pages.

    Args:
        caches: of the pages.
        pages: those of the sequence, and `state` that of what its layers have summed up of these tokens.
    """

    def __init__(self, caches: PagedCaches, pages: torch.Tensor, tokens: int, state: int) -> None:
        super().__init__(None, tokens)
        self._caches, self._piece = caches, Piece(pages, tokens, 0, state, state)
        block = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._pages = pages[block // PAGE_TOKENS : -(-tokens // PAGE_TOKENS)].long()
        self._rest = tokens - block

    def layers(self) -> Iterator[tuple[list[tuple[str, torch.Tensor]], dict[str, _Plain]]]:
        # Looked at anew each time: on a card pages may lie elsewhere by now, and nothing is to keep their old memory.
        for paged, states in zip(self._caches.layers, self._caches.of(self._piece).layers, strict=True):
            if isinstance(paged, StatePages):
                yield _held_by(states)
                continue
            # By pages, which lie together: [pages, H, tokens, ...] -> [H, tokens, ...].
            parts = (
                [part[self._pages].transpose(0, 1).flatten(1, 2) for part in parts_of_pages(paged)]
                if self._rest
                else []
            )
            yield [(f"rows {index}", part[:, : self._rest]) for index, part in enumerate(parts)], {}


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
            named = {part.name: each[0] for part, each in zip(layer.tensors, parts, strict=True)}
            both = {f"{_CONVOLVED} 0": paged.recent, f"{_RECURRENT} 0": paged.states}
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


def _held_by(states: Any) -> tuple[list[tuple[str, torch.Tensor]], dict[str, _Plain]]:
    if type(states) is GrowingWindowLayer:
        return [("keys", states.keys), ("values", states.values)], {"cumulative_length": states.cumulative_length}
    tensors: list[tuple[str, torch.Tensor]] = []
    plain: dict[str, _Plain] = {}
    for name, value in vars(states).items():
        if name == "_where":
            continue
        each = {f"{name} {key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for at, item in each.items():
            if isinstance(item, torch.Tensor) and not item.numel():
                plain[at] = None  # as good as none
            elif isinstance(item, torch.Tensor):
                tensors.append((at, item))
            elif item is None or isinstance(item, bool | int):
                plain[at] = item
            elif not isinstance(item, torch.device | torch.dtype):
                raise LookupError(f"{type(states).__name__} holds a {type(item).__name__}")
    return tensors, plain


def restore(cache: Any, layout: StateLayout, data: torch.Tensor, device_of: Callable[[int], torch.device]) -> None:
    """Makes the forgetful layers of a new cache hold what was kept, and adds the last rows of the others.

    Raises:
        LookupError: it is of another cache.
    """
    if len(layout.layers) != len(cache.layers):
        raise LookupError("the cache has other layers")
    for number, (states, layer, parts) in enumerate(zip(cache.layers, layout.layers, layout.parts(data), strict=True)):
        device = device_of(number)
        tensors = [part.to(device, copy=True) for part in parts]
        if keeps_rows(states):
            if tensors:
                _append(states, tensors)
        elif type(states) is GrowingWindowLayer:
            restore_window(states, tensors, layout.tokens)
        elif _is_plain(states):
            _restore_state(states, layer, tensors, device)
        else:
            raise LookupError("a layer of another kind")


def _append(states: Any, tensors: list[torch.Tensor]) -> None:
    rows = make_rows(states, tensors[0].shape[1], [part[:, :1] for part in tensors])
    for target, source in zip(rows, tensors, strict=True):
        target.copy_(source)


def restore_window(states: GrowingWindowLayer, tensors: list[torch.Tensor], tokens: int) -> None:
    """Makes an empty layer hold the last of `tokens` tokens, keys and values [1, H, rows, D].

    Raises:
        LookupError: they are of another window.
    """
    rows = min(tokens, states.sliding_window - 1)
    if len(tensors) != 2 or any(each.dim() != 4 or each.shape[-2] != rows for each in tensors):
        raise LookupError("a window of another size")
    states.update(*tensors)
    states.cumulative_length = tokens


def _restore_state(states: Any, layer: LayerState, tensors: list[torch.Tensor], device: torch.device) -> None:
    values: list[tuple[str, Any]] = [*((part.name, each) for part, each in zip(layer.tensors, tensors, strict=True))]
    for at, value in [*values, *layer.plain]:
        name, _, key = at.partition(" ")
        now = vars(states).get(name)
        if name not in vars(states) or isinstance(now, dict) is not bool(key):
            raise LookupError(f"{name} is something else now")
        if isinstance(now, dict):
            now[int(key) if key.isdecimal() else key] = value
        else:
            setattr(states, name, value)
    states.device = device
    states.dtype = next((each.dtype for each in tensors if each.is_floating_point()), None)
