"""A layer's attention in native calls: of a prompt, and of the next tokens of several sequences, into their pages."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.families import fast_path_of
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.paged_attention import FEWEST_TOKENS, Pieces, attend_prompt, is_faster
from engine.kernels.native.structs import PagesStruct
from engine.runtime.fast_path.angles import Angles
from engine.runtime.fast_path.norms import mixer_of
from engine.runtime.kv.paged_cache import PagedCacheLayer


class NoAttention:
    """In place of the attention of a layer that is an MLP alone.

    Attributes: as of `NativeAttention`.
    """

    type = ""
    rotated = address = 0
    has_index = False

    def __init__(self, _layer: Any, kernels: NativeKernels) -> None:
        self.kernels = kernels

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether this decoder layer is one."""
        path = fast_path_of(layer, "layer")
        return path is not None and path.of_one_part and mixer_of(layer) is None

    def step(self, hidden_states: torch.Tensor, _cache: Any, _positions: Any) -> torch.Tensor:
        """What it is given."""
        return hidden_states

    def rows(self, hidden_states: torch.Tensor, *_where: Any) -> torch.Tensor:
        """What it is given."""
        return hidden_states

    def angles_of(self, _positions: Any, _tokens: int) -> Angles | None:
        """None at all."""
        return Angles.none()


class NativeAttention(ABC):
    """The attention of one decoder layer.

    Attributes:
        type: which of the model's angles it rotates by; see `type_of`.
        rotated: dimensions of each head that are.
        address: of its struct.
    """

    type: str
    rotated: int
    address: int
    _index: int
    _index_struct: ctypes.Structure | None = None

    def __init__(self, kernels: NativeKernels, call: Callable[..., int]) -> None:
        self.kernels, self._call = kernels, call

    @property
    def has_index(self) -> bool:
        """Whether an index chooses what tokens attend to."""
        return self._index_struct is not None

    @abstractmethod
    def angles_of(self, positions: Any, tokens: int) -> Angles | None:
        """The angles of so many tokens; `None` if these are others."""

    def step(self, hidden_states: torch.Tensor, cache: Any, positions: Any) -> torch.Tensor | None:
        """float32 [1, q, hidden], contiguous, with attention's result added; `None` if this is not for it.

        Args:
            cache: the pages of a sequence.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        tokens, held = hidden_states.shape[1], cache.layers[self._index]
        if not isinstance(held, PagedCacheLayer) or self.angles_of(positions, tokens) is None:
            return None
        pieces = held.take(tokens)
        return None if pieces is None else self.rows(hidden_states, held.struct, pieces, positions)

    def rows(self, hidden_states: torch.Tensor, held: PagesStruct, pieces: Pieces, positions: Any) -> torch.Tensor:
        """The same of the next tokens of several sequences, whose keys and values go into pages."""
        angles = self.angles_of(positions, pieces.tokens)
        assert angles is not None
        where = (ctypes.addressof(held), pieces.address_for(held), len(pieces.pieces))
        return self._compute(hidden_states, where, angles)

    def _compute(self, hidden_states: torch.Tensor, where: tuple[int, int, int], angles: Angles) -> torch.Tensor:
        assert hidden_states.dtype == torch.float32
        out = torch.empty_like(hidden_states)
        start = hidden_states.data_ptr()
        if self._call(self.kernels.pool, self.address, *where, start, *angles.arguments, out.data_ptr()):
            raise out_of_memory()
        return out


_REPLACED = "sdpa"
"""The name stays: some families of the library look at it, and leave a mask out under any other."""
_OTHERS = ("position_bias", "cache", "softcap")
"""Options by which the library's own function computes something else; it ignores all that are not its parameters."""


def speed_up_prompts(model: Any, kernels: NativeKernels) -> int:
    """Lets attention modules on the CPU use the kernels for prompts; returns their number."""
    if not is_faster(kernels):
        return 0
    modules = [module for module in model.modules() if hasattr(module, "config")]
    for module in modules:
        module.__dict__["prompt_kernels"] = kernels
    return len(modules)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    kernels: NativeKernels | None = module.__dict__.get("prompt_kernels")
    if kernels is not None and dropout == 0 and _is_plain(module, query, key, value, attention_mask, options):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sees = None if attention_mask is None else attention_mask[0, 0]
        out = attend_prompt(kernels, query[0], key[0], value[0], scale, sees) if scale > 0 else None
        if out is not None:
            return out[None], None
    return sdpa_attention_forward(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )


def _is_plain(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> bool:
    """Whether the kernels may compute it: one sequence in bf16 on the CPU, each token seeing a range of keys."""
    tokens, held = query.shape[2], key.shape[2]
    if (
        tokens < FEWEST_TOKENS
        or query.shape[0] != 1
        or {each.dtype for each in (query, key, value)} != {torch.bfloat16}
    ):
        return False
    if (
        query.device.type != "cpu"
        or key.device.type != "cpu"
        or query.shape[1] % key.shape[1]
        or key.shape[1] != value.shape[1]
    ):
        return False
    if any(options.get(name) is not None for name in _OTHERS):
        return False
    if mask is not None:
        return mask.dtype == torch.bool and mask.shape == (1, 1, tokens, held)
    causal = options.get("is_causal")
    return tokens == held and bool(getattr(module, "is_causal", True) if causal is None else causal)


ALL_ATTENTION_FUNCTIONS.register(_REPLACED, _attention)
