"""Queries and keys of a model's attention on a card: their norms and rotation in one launch.

The library's attention stays what it is.  Each attention module gets a `forward` of the same code in which
`apply_rotary_pos_emb` is ours, and its norms of queries and keys hand on what they are given: what they should have
done is done with the rotation.  Every module is tried: what it gives its attention function, before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.families.library import code_of, forward_with, own_forward, replaced
from engine.kernels.cuda.compiled import STATES, Argument, Kernel
from engine.kernels.cuda.driver import OnCard
from engine.kernels.gpu.modules import FEW_ROWS, CardNorm, Fused, Taken, is_alike

ROTARY_KERNEL = Kernel("rotary.cu")
_HEADS_OF_BLOCK = 4


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and keys before they are rotated.

    Attributes:
        query_weight, key_weight: contiguous, of one type in `STATES`: [dim], or [heads x dim] if `all_heads`.
        epsilon: added to the mean square.
        offset: added to weights.
        rounds_once: whether the weight multiplies before rounding, not after.
        all_heads: whether the mean is over all heads together.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    epsilon: float
    offset: float
    rounds_once: bool
    all_heads: bool


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """What a family means by a rotation.

    Attributes:
        is_interleaved: pairs are neighbouring elements, not half of the rotated ones apart.
        angle_step: from a pair's angle to the next one's.
        angles_of_pair: how often the angle of each pair is there.
        rounds_once: whether only the result is rounded to the states' type, not each product.
    """

    is_interleaved: bool
    angle_step: int
    angles_of_pair: int
    rounds_once: bool


class CudaRotary(OnCard):
    """Rotations on one card."""

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        form: RotaryForm,
        norms: HeadNorms | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms and rotates one token's heads, or several tokens'.

        Args:
            queries: [rows, heads, dim] of a type in `STATES`, elements of a head contiguous.
            keys: [rows, kv_heads, dim] of the same type.
            cosines, sines: [rows or 1, angles] with the same strides; those of each row, or of all.
            norms: applied before.
        """
        dim = queries.shape[2]
        outs = [x.new_empty(x.shape) for x in (queries, keys)]
        weights = (norms.query_weight, norms.key_weight) if norms is not None else (None, None)
        own: list[Argument] = [
            {"x": x, "out": out, "weights": of, "row_step": x.stride(0), "head_step": x.stride(1), "heads": x.shape[1]}
            for x, out, of in zip((queries, keys), outs, weights, strict=True)
        ]
        of_norms: dict[str, Argument] = {}
        if norms is not None:
            of_norms = {
                "norms_all_heads": norms.all_heads, "norm_rounds_once": norms.rounds_once,
                "weight_states": norms.query_weight.dtype, "epsilon": norms.epsilon, "offset": norms.offset,
            }  # fmt: skip
        heads = queries.shape[1] + keys.shape[1]
        self.start(
            ROTARY_KERNEL, (-(-heads // _HEADS_OF_BLOCK), len(queries), 1), queries=own[0], keys=own[1],
            cosines=cosines, sines=sines, angle_row_step=cosines.stride(0) if len(cosines) > 1 else 0, dim=dim,
            rotated=2 * (cosines.shape[1] // form.angles_of_pair), angle_step=form.angle_step,
            is_interleaved=form.is_interleaved, rounds_once=form.rounds_once, states=queries.dtype,
            angle_states=cosines.dtype, **of_norms,
        )  # fmt: skip
        return outs[0], outs[1]


_NAME = "apply_rotary_pos_emb"
"""Of the function in the library's files of nearly all families."""
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"
"""Of the registry there that attention functions are taken from."""
TRIED_POSITIONS = (3, 77, 1003)
_TRIED_HEADS = (4, 2)
_FORMS = tuple(
    RotaryForm(is_interleaved, step, times, once)
    for once in (False, True)
    for is_interleaved, step, times in ((False, 1, 2), (False, 1, 1), (True, 1, 2), (True, 2, 2))
)
"""Half of a head apart with angles for both halves or one; neighbours with angles by halves or in pairs."""


class Rotation:
    """`apply_rotary_pos_emb` of one attention module."""

    def __init__(self, in_library: Callable[..., Any], kernel: CudaRotary, form: RotaryForm) -> None:
        self.in_library = in_library
        self._kernel, self._form = kernel, form
        self._norms: tuple[CardNorm, CardNorm] | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def takes(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether the kernel rotates these, and not the library."""
        return self._rows(q, k, cos, sin) is not None

    def norm_later(self, norms: tuple[CardNorm, CardNorm]) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        """What takes the places of the norms of queries and keys."""
        self._norms = norms
        return [_Later(self, number, norm) for number, norm in enumerate(norms)]

    def wait(self, number: int, states: torch.Tensor) -> torch.Tensor:
        """Queries (0) or keys (1), normed when they are rotated, or now."""
        assert self._norms is not None
        norm = self._norms[number]
        self._waiting.pop(number, None)
        if not self._is_few(states, norm.weight.numel()):
            return norm(states)
        self._waiting[number] = states
        return states

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any) -> Any:
        """[B, heads, T, dim] of queries and keys, and angles [B or 1, T, ..] -> both, rotated."""
        waiting, self._waiting = self._waiting, {}
        for number, of in waiting.items():
            if (q, k)[number].data_ptr() != of.data_ptr() or (q, k)[number].numel() != of.numel():
                raise ValueError("queries or keys are not rotated as their norms left them")
        states = self._rows(q, k, cos, sin) if not more else None
        norms = self._head_norms(q, k) if len(waiting) == 2 else None
        if states is not None and (norms is not None or not waiting):
            rotated = self._kernel(*states, self._form, norms)
            shapes = ((x.shape[0], x.shape[2], x.shape[1], x.shape[3]) for x in (q, k))
            return tuple(x.view(shape).transpose(1, 2) for x, shape in zip(rotated, shapes, strict=True))
        q, k = (self._normed(x, number) if number in waiting else x for number, x in enumerate((q, k)))
        return self.in_library(q, k, cos, sin, *more)

    def _normed(self, states: torch.Tensor, number: int) -> torch.Tensor:
        assert self._norms is not None
        norm, (batch, heads, tokens, dim) = self._norms[number], states.shape
        rows = states.transpose(1, 2).reshape(-1, norm.weight.numel())
        return norm(rows).view(batch, tokens, heads, dim).transpose(1, 2)

    @staticmethod
    def _is_few(states: torch.Tensor, width: int) -> bool:
        """Whether these are few tokens' [B, T, heads, dim], or [B, T, heads x dim], with norms of this width."""
        return (
            states.dtype in STATES and states.shape[-1] == width and 0 < states.shape[0] * states.shape[1] <= FEW_ROWS
        )

    def _rows(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """[rows, heads, dim] of queries and keys, [rows or 1, ..] of angles; `None` if these are not for the kernel."""
        if not (isinstance(cos, torch.Tensor) and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3):
            return None
        (batch, _, tokens, dim), wide = q.shape, cos.shape[-1] * 2 // self._form.angles_of_pair
        rows = batch * tokens
        if (
            not 0 < rows <= FEW_ROWS
            or q.dtype not in STATES
            or k.dtype != q.dtype
            or cos.dtype not in STATES
            or sin.dtype != cos.dtype
            or cos.shape != sin.shape
            or cos.shape[1] != tokens
            or cos.shape[0] not in (1, batch)
            or (cos.shape[0] != batch and tokens != 1)
            or wide > dim
            or wide % 2
            or k.shape[0] != batch
            or k.shape[2:] != q.shape[2:]
            or any(x.device != q.device for x in (k, cos, sin))
        ):
            return None
        q, k = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
        q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
        cos, sin = (x.flatten(0, 1).contiguous() for x in (cos, sin))
        return q, k, cos, sin

    def _head_norms(self, q: torch.Tensor, k: torch.Tensor) -> HeadNorms | None:
        """Norms of these, if nothing but their shape has changed since the norms were asked for."""
        assert self._norms is not None
        first, second = self._norms
        dim = q.shape[3]
        all_heads = first.weight.numel() != dim
        widths = (q.shape[1] * dim, k.shape[1] * dim) if all_heads else (dim, dim)
        if (first.weight.numel(), second.weight.numel()) != widths:
            return None
        form = first.form
        return HeadNorms(first.weight, second.weight, first.epsilon, form.offset, form.rounds_once, all_heads)


class _Later:
    """The `forward` of a norm of queries or keys."""

    def __init__(self, rotation: Rotation, number: int, norm: CardNorm) -> None:
        self.in_library, self._rotation, self._number = norm, rotation, number

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._rotation.wait(self._number, hidden_states)


def speed_up_rotations(model: Any, angles: Callable[[torch.Tensor], Any]) -> int:
    """Attention modules.

    Args:
        angles: hidden states [1, T, hidden] -> what the model gives its layers as `position_embeddings`.
    """
    forms: dict[tuple[object, torch.dtype], RotaryForm | None] = {}

    def rotated(module: Any, kernel: CudaRotary) -> Taken:
        library, weight = _rotation_in_library(module), _weight_of(module)
        assert library is not None
        norms: tuple[Any, ...] = tuple(getattr(module, name, None) for name in ("q_norm", "k_norm"))
        hidden = _hidden(module, weight)
        embeddings = angles(hidden)
        if (library, weight.dtype) not in forms:
            forms[library, weight.dtype] = _form_of(library, kernel, embeddings, weight)
        form = forms[library, weight.dtype]
        if form is None:
            return []
        wanted = _attended(module, library, hidden, embeddings)
        alike = [norm for norm in map(own_forward, norms) if isinstance(norm, CardNorm)]
        for is_later in (True, False) if _can_wait(module, alike) else (False,):
            rotation = Rotation(library, kernel, form)
            later = list(zip(norms, rotation.norm_later((alike[0], alike[1])), strict=True)) if is_later else []
            with replaced(later):
                found = _attended(module, rotation, hidden, embeddings)
            if all(is_alike(mine, its) for mine, its in zip(found, wanted, strict=True)):
                return [*later, (module, forward_with(module, {_NAME: rotation}))]
        return []

    return Fused("rotations", CudaRotary, _place_of, rotated).speed_up(model.modules())


def _place_of(module: Any) -> torch.device | None:
    weight = _weight_of(module) if _rotation_in_library(module) is not None else None
    return weight.device if weight is not None and weight.dtype in STATES else None


def _weight_of(module: Any) -> Any:
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def _rotation_in_library(module: Any) -> Callable[..., Any] | None:
    """The function by which an attention module of the library rotates, as long as its code is called as it is."""
    forward = code_of(module)
    found = forward.__globals__.get(_NAME) if forward is not None and _NAME in forward.__code__.co_names else None
    return found if callable(found) else None


def _can_wait(module: Any, norms: list[CardNorm]) -> bool:
    """Whether both norms are kernels of one kind, and nothing is done to queries and keys before they are rotated."""
    if len(norms) != 2 or getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        return False
    first, second = norms
    same = (first.epsilon, first.form, first.weight.dtype) == (second.epsilon, second.form, second.weight.dtype)
    return same and first.weight.is_contiguous() and second.weight.is_contiguous()


def _hidden(module: Any, weight: torch.Tensor) -> torch.Tensor:
    width = next(p for p in (getattr(module, "q_proj", None), getattr(module, "qkv_proj", None)) if p is not None)
    drawn = torch.randn(1, len(TRIED_POSITIONS), width.in_features, generator=torch.Generator().manual_seed(4))
    return drawn.to(weight.device, weight.dtype)


class _SeenError(Exception):
    """An attention function was called."""

    def __init__(self, states: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.states = states


class _Watched:
    """In the place of the library's registry: what it gives stops whoever calls it."""

    @staticmethod
    def get_interface(*_: object) -> Callable[..., Any]:
        """As the library's."""

        def attention(_module: Any, q: torch.Tensor, k: torch.Tensor, *_: Any, **_more: Any) -> None:
            raise _SeenError((q, k))

        return attention


def _attended(
    module: Any, rotation: Callable[..., Any], hidden: torch.Tensor, embeddings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys that a module gives its attention function, if it rotates them so."""
    forward = forward_with(module, {_NAME: rotation, _ATTENTION: _Watched()})
    try:
        forward(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, cache=None)
    except _SeenError as seen:
        return seen.states
    raise LookupError("it does not call the library's attention functions")


def _form_of(
    library: Callable[..., Any], kernel: CudaRotary, embeddings: Any, weight: torch.Tensor
) -> RotaryForm | None:
    """What the library's function means, found by trying it: on heads half of which, or all, are rotated."""
    cos, sin = embeddings
    generator = torch.Generator().manual_seed(4)
    wide = 2 * cos.shape[-1]
    q, k = (
        torch.randn(1, heads, cos.shape[1], wide, generator=generator).to(weight.device, weight.dtype)
        for heads in _TRIED_HEADS
    )
    for dim in (wide, wide // 2):
        parts = q[..., :dim], k[..., :dim]
        try:
            wanted = library(*parts, cos, sin)
        except RuntimeError:  # it rotates whole heads only
            continue
        for form in _FORMS:
            rotation = Rotation(library, kernel, form)
            if rotation.takes(*parts, cos, sin) and all(
                is_alike(mine, its) for mine, its in zip(rotation(*parts, cos, sin), wanted, strict=True)
            ):
                return form
    return None
