"""Multi-head latent attention of a model's single tokens on a card: three launches between its projections.

The library expands the latents of the whole context to keys and values for every token.  Here queries and mixtures of
latents go through that matrix instead (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2), and the context is read where
it lies.  Each attention module is tried: what it returns, and what it keeps of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from engine.families.library import code_of, own_forward
from engine.formats.tiles import TiledMatrix
from engine.kernels.cuda.attention import CudaLatents, LatentForm, LatentNorm, LatentShape
from engine.kernels.cuda.compiled import STATES
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.gpu.modules import CardForward, CardNorm, Fused, Taken
from engine.kernels.gpu.pages import PageTable
from engine.kernels.native.paged_attention import KvType

_PARTS = {
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
}
_SIZES = ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_CALLED = {"apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb", "eager_attention_forward"}
"""Functions of the library's file that such a module calls; one that calls another computes something else."""
_PAIRED: tuple[LatentForm, ...] = (
    LatentForm(takes_pairs=True, makes_pairs=False, angle_step=1, rounds_once=False),
    LatentForm(takes_pairs=False, makes_pairs=False, angle_step=1, rounds_once=False),
)
_COMPLEX: tuple[LatentForm, ...] = (LatentForm(takes_pairs=True, makes_pairs=True, angle_step=2, rounds_once=True),)
"""Forms where angles are cosines and sines, or complex numbers."""
_TRIED_HELD = (1, 45)
_UNLIKE = {torch.bfloat16: 0.04, torch.float16: 0.008, torch.float32: 1e-4}
"""Of the largest number: the library rounds the keys and values that it makes."""
_SAME = 0.9
"""Of the numbers that are kept of a token have the same bits."""


@dataclass(frozen=True, slots=True)
class LatentContext:
    """The context of one layer in a step of a few tokens.

    Attributes:
        held: int64 [q], tokens before each.
        window: tokens seen, itself included; 0: all.
    """

    table: PageTable
    held: torch.Tensor
    window: int


class CardLatents(CardForward):
    """The `forward` of one attention module."""

    def __init__(self, module: Any, kernel: CudaLatents, norm: CardNorm, form: LatentForm) -> None:
        super().__init__(module)
        self._kernel, self._form = kernel, form
        self._norm = norm
        heads, rank, rope, key_dim, value_dim = (getattr(module, name) for name in _SIZES)
        self._shape = LatentShape(heads, rank, rope, key_dim, value_dim)
        matrix = _matrix(module.kv_b_proj)
        if matrix is None or not kernel.takes(self._shape, matrix):
            raise LookupError("no kernel reads its matrix")
        self._matrix = matrix

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **more: Any,
    ) -> Any:
        """As the library's; a few tokens over tables are the kernels'."""
        latents = getattr(cache, "latents", None)
        if latents is not None and len(hidden_states) == 1 and hidden_states.dtype in STATES:
            context = latents(self._module.layer_idx, attention_mask)
            if self._kernel.keeps(context.table) and hidden_states.shape[1] == len(context.held):
                return self.step(hidden_states, position_embeddings, context), None
        return self.in_library(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            cache=cache,
            **more,
        )

    def step(self, hidden_states: torch.Tensor, embeddings: Any, context: LatentContext) -> torch.Tensor:
        """[1, q, hidden] -> the same, with each token stored in its context."""
        module, shape, norm, tokens = self._module, self._shape, self._norm, hidden_states.shape[1]
        if module.q_lora_rank is None:
            queries = module.q_proj(hidden_states)
        else:
            queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
        found = self._kernel.attend(
            context.table,
            shape,
            self._matrix,
            queries.view(tokens, shape.heads, shape.key_dim + shape.rope),
            module.kv_a_proj_with_mqa(hidden_states).view(tokens, shape.rank + shape.rope),
            LatentNorm(norm.weight, norm.epsilon, norm.form.offset, norm.form.rounds_once),
            _angles(embeddings, tokens),
            self._form,
            context.held,
            scale=module.scaling,
            window=context.window,
        )
        result: torch.Tensor = module.o_proj(found.view(1, tokens, shape.heads * shape.value_dim))
        return result


def _angles(embeddings: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [q, n]: complex numbers have them in turn."""
    if isinstance(embeddings, torch.Tensor):
        both = torch.view_as_real(embeddings).reshape(tokens, -1)
        return both, both[:, 1:]
    cos, sin = (each.reshape(tokens, -1) for each in embeddings)
    return cos, sin


def _matrix(module: Any) -> TiledMatrix | torch.Tensor | None:
    """What a linear layer without a bias multiplies with."""
    if module.bias is not None:
        return None
    forward = own_forward(module)
    if isinstance(forward, CardLinear):
        return forward.matrix if isinstance(forward.matrix, TiledMatrix) else None
    weight: torch.Tensor = module.weight
    return weight.detach() if forward is None and type(module) is torch.nn.Linear else None


def speed_up_latents(model: Any, angles: Callable[[torch.Tensor], Any]) -> int:
    """Modules with latent attention.

    Args:
        angles: hidden states [1, T, hidden] -> what the model gives its layers as `position_embeddings`.
    """

    def place(module: Any) -> torch.device | None:
        return norm.weight.device if (norm := _norm_of(module)) is not None else None

    def attended(module: Any, kernel: CudaLatents) -> Taken:
        norm = _norm_of(module)
        assert norm is not None
        return _made(module, kernel, norm, angles)

    return Fused("latent attention", CudaLatents, place, attended).speed_up(model.modules())


def _norm_of(module: Any) -> CardNorm | None:
    """That of the latents of a module which is nothing but latent attention, and a kernel's."""
    forward = code_of(module)
    if forward is None:
        return None
    children = {name for name, child in module.named_children() if child is not None}
    called = {name for name in forward.__code__.co_names if isinstance(forward.__globals__.get(name), FunctionType)}
    if (
        not {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"} <= children <= _PARTS
        or not called <= _CALLED
        or any(True for _ in module.parameters(recurse=False))
        or not all(isinstance(getattr(module, name, None), int) for name in (*_SIZES, "layer_idx"))
        or not hasattr(module, "expand_kv")
    ):
        return None
    norm = own_forward(module.kv_a_layernorm)
    return norm if isinstance(norm, CardNorm) else None


class _TriedCache:
    """In the place of the library's cache: latents and rotated keys of some tokens, to which one more is added."""

    def __init__(self, latents: torch.Tensor, keys: torch.Tensor) -> None:
        self._before = latents, keys
        self.own: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, latents: torch.Tensor, keys: torch.Tensor, *_: Any, **_more: Any) -> tuple[torch.Tensor, ...]:
        """[1, 1, 1, n] -> [1, 1, tokens, n] of both."""
        self.own = latents, keys
        pairs = zip(self._before, (latents, keys), strict=True)
        return tuple(torch.cat([before, own], dim=2) for before, own in pairs)


def _made(module: Any, kernel: CudaLatents, norm: CardNorm, angles: Callable[[torch.Tensor], Any]) -> Taken:
    weight = norm.weight
    generator = torch.Generator().manual_seed(8)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(weight.device, weight.dtype)

    hidden = drawn(1, 1, module.kv_a_proj_with_mqa.in_features)
    embeddings = angles(hidden)
    forms = _COMPLEX if isinstance(embeddings, torch.Tensor) else _PAIRED
    if isinstance(embeddings, torch.Tensor):
        embeddings = embeddings[:, -1:].contiguous()
    else:
        embeddings = tuple(each[:, -1:].contiguous() for each in embeddings)
    sizes = module.kv_lora_rank, module.qk_rope_head_dim
    contexts = [tuple(drawn(1, 1, held, size) for size in sizes) for held in _TRIED_HELD]
    for form in forms:
        made = CardLatents(module, kernel, norm, form)
        if all(_is_right(made, module, hidden, embeddings, context) for context in contexts):
            return [(module, made)]
    return []


def _is_right(
    made: CardLatents, module: Any, hidden: torch.Tensor, embeddings: Any, context: tuple[torch.Tensor, ...]
) -> bool:
    """Whether a token after this context comes out as the library has it, and is kept as it would be."""
    latents, keys = context
    held = latents.shape[2]
    cache = _TriedCache(latents, keys)
    wanted = module.forward(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, cache=cache)[0]
    rows = [torch.cat([part[0], part.new_zeros(1, 1, part.shape[-1])], dim=1) for part in context]
    kv_type = next(each for each in KvType if each.dtype == hidden.dtype)
    table = PageTable(kv_type, 1, 1 + held // 32, hidden.device)
    table.set_rows(0, rows)
    before = torch.tensor([held], device=hidden.device)
    found = made.step(hidden, embeddings, LatentContext(table, before, 0))
    assert cache.own is not None
    for mine, its in zip(rows, cache.own, strict=True):
        kept, meant = mine[0, held], its.flatten()
        same = (kept == meant).float().mean().item()
        if not torch.allclose(kept.float(), meant.float(), rtol=0.02, atol=0.02):
            return False
        if kept.dtype != torch.float32 and same < _SAME:
            return False
    limit = _UNLIKE[hidden.dtype] * wanted.float().abs().max()
    return bool((found.float() - wanted.float()).abs().max() <= limit)
