"""Rotary angles as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.families import fast_path_of

_FIXED = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary embeddings whose angles depend on the position alone, not on how long the context is."""

_PAGE = 256
"""Positions whose angles are computed together."""
_MOST_PAGES = 16
"""Kept: those of sequences that take turns, or are computed together."""


class Angles(NamedTuple):
    """Cosines and sines of some tokens.

    Attributes:
        arguments: where the first ones are, how many floats lie between those of a token, and between tokens.
        held: what they lie in.
    """

    arguments: tuple[int | None, int | None, int, int]
    held: tuple[torch.Tensor, ...]

    @classmethod
    def none(cls) -> Angles:
        """Of layers that rotate nothing."""
        return cls((None, None, 0, 0), ())

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """Those of [1, q, angles] each."""
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        return cls((cos.data_ptr(), sin.data_ptr(), 1, cos.shape[-1]), (cos, sin))

    @classmethod
    def of_complex(cls, turns: torch.Tensor) -> Angles:
        """Those of numbers [1, q, angles] on the unit circle."""
        turns = turns.contiguous()
        start = turns.data_ptr()
        return cls((start, start + 4, 2, 2 * turns.shape[-1]), (turns,))


def type_of(attention: Any) -> str:
    """Which of a model's `layer_types` has angles of its own, and this attention module is of; empty if none has."""
    path = fast_path_of(attention, "attention")
    if path is None or not path.angles_by_type:
        return ""
    own: str | None = getattr(attention, "rope_layer_type", None)
    name: str = own or attention.config.layer_types[attention.layer_idx]
    return name


class Rotations:
    """What a model's rotary embedding gives for positions, by the type of the layers that it is for.

    Args:
        rotary: the model's; `None` if it rotates nothing.
        types: of its layers, by `type_of`.

    Attributes:
        is_fixed: whether it depends on the position alone.
    """

    def __init__(self, rotary: Any, types: set[str]) -> None:
        self._rotary, self._types = rotary, sorted(types)
        kind = getattr(rotary, "rope_type", None) if rotary is not None else "default"
        self.is_fixed = set(kind.values() if isinstance(kind, dict) else [kind]) <= set(_FIXED)
        self._pages: dict[int, list[dict[str, Any]]] = {}

    def of(self, like: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        """Of positions [B, q]: tensors, or cosines and sines, [B, q, angles]."""
        if self._rotary is None:
            return dict.fromkeys(self._types)
        return {name: self._rotary(like, position_ids, *([name] if name else ())) for name in self._types}

    def at(self, positions: Sequence[int], like: torch.Tensor) -> dict[str, Any]:
        """The same of these positions, whichever they are if nothing but them counts."""
        if not self.is_fixed:
            return self.of(like, torch.tensor([list(positions)], device=like.device))
        if len(positions) == 1:
            return self._of_one(positions[0], like)
        found = [self._of_one(position, like) for position in positions]
        return {name: _joined([one[name] for one in found]) for name in self._types}

    def _of_one(self, position: int, like: torch.Tensor) -> dict[str, Any]:
        page, row = divmod(position, _PAGE)
        rows = self._pages.get(page)
        if rows is None:
            if len(self._pages) == _MOST_PAGES:
                del self._pages[next(iter(self._pages))]
            rows = self._pages[page] = self._of_page(page, like)
        return rows[row]

    def _of_page(self, page: int, like: torch.Tensor) -> list[dict[str, Any]]:
        ids = torch.arange(page * _PAGE, (page + 1) * _PAGE, device=like.device).unsqueeze(0)
        found = self.of(like, ids)
        return [{name: _row(each, row) for name, each in found.items()} for row in range(_PAGE)]


def _row(found: Any, row: int) -> Any:
    if found is None:
        return None
    if isinstance(found, torch.Tensor):
        return found[:, row : row + 1]
    return tuple(part[:, row : row + 1] for part in found)


def _joined(found: list[Any]) -> Any:
    if found[0] is None:
        return None
    if isinstance(found[0], torch.Tensor):
        return torch.cat(found, dim=1)
    return tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
