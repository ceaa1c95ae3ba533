"""Modules of a model on a card that kernels compute, each seen to give what the module gives before it takes its place;
and the first of them: norms, the residual sums before them, and the angles that queries and keys are rotated by.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

from engine.families.library import own_forward, replaced, take_over
from engine.kernels.cuda.compiled import STATES, CompileError, Kernel
from engine.kernels.cuda.driver import DriverError, Kernels, Launcher, OnCard, on_card

_log = logging.getLogger(__name__)

FEW_ROWS = 16
"""Tokens of a step that kernels are for; a library's operators take more as fast."""


class CardForward:
    """In the place of a module's `forward`; what it is not for is left to the library's."""

    def __init__(self, module: Any) -> None:
        self.in_library, self._module = module.forward, module


Taken = Iterable[tuple[Any, Callable[..., Any]]]
"""Modules, and what is to compute them."""


@dataclass(frozen=True)
class Fused(Generic[Kernels]):
    """What kernels may compute in the place of one kind of module.

    Attributes:
        words: what that is, for the log.
        kernels: of a card.
        place: of a module of this kind; `None` for any other.
        takes: what has been seen to give the same as such a module, and as others with it; nothing if nothing does.
    """

    words: str
    kernels: Callable[[Launcher], Kernels]
    place: Callable[[Any], torch.device | None]
    takes: Callable[[Any, Kernels], Taken]

    @torch.inference_mode()
    def speed_up(self, modules: Iterable[Any]) -> int:
        """Lets kernels compute all of these that they can, and says how many; the others stay as they are."""
        count, of_card = 0, dict[torch.device, Kernels | None]()
        for module in modules:
            place = self.place(module) if own_forward(module) is None else None
            if place is None:
                continue
            if place not in of_card:
                of_card[place] = on_card(place, self.kernels)
            kernels = of_card[place]
            try:
                taken = list(self.takes(module, kernels)) if kernels is not None else []
            except Exception as error:  # whatever a module wants to be given, or a driver says: operators do it
                level = logging.WARNING if isinstance(error, CompileError | DriverError) else logging.INFO
                _log.log(level, "no kernel computes %s on %s (%s: %s)", self.words, place, type(error).__name__, error)
                continue
            count += take_over(taken) > 0
        return count


# --- norms ------------------------------------------------------------------------------------------------------------

NORM_KERNEL = Kernel("norm.cu")


@dataclass(frozen=True, slots=True)
class NormForm:
    """What families mean by a root mean square norm.

    Attributes:
        offset: added to weights.
        rounds_once: whether the weight multiplies before rounding to the type of what is normed, not after.
    """

    offset: float = 0.0
    rounds_once: bool = False


_FORMS = (NormForm(), NormForm(rounds_once=True), NormForm(1.0, rounds_once=True))


class CudaNorm(OnCard):
    """Norms on one card."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, form: NormForm) -> torch.Tensor:
        """x / sqrt(mean(x^2) + epsilon) * (weight + offset), in fp32.

        Args:
            x: [rows, width] of a type in `STATES`, elements of a row contiguous.
            weight: [width], contiguous, of a type in `STATES`; `None`: there is none, and no offset.

        Returns:
            [rows, width], contiguous, of x's type.
        """
        return self.add(x, None, weight, epsilon, form)[1]

    def add(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        form: NormForm,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + added * scale, each rounded to x's type, and its norm.

        Args:
            added: as x, contiguous; `None`: nothing.
        """
        (rows, width), out, both = x.shape, x.new_empty(x.shape), x if added is None else x.new_empty(x.shape)
        self.start(
            NORM_KERNEL, (rows, 1, 1), x=x, added=added, sum=both, out=out, weights=weight, step=x.stride(0),
            width=width, states=x.dtype, weight_states=x.dtype if weight is None else weight.dtype,
            rounds_once=form.rounds_once, epsilon=epsilon, offset=form.offset, added_scale=scale,
        )  # fmt: skip
        return both, out


_ROWS = 3
_PLAIN_WIDTH = 65
_SAME = 0.95
"""Of all numbers have the same bits: sums in another order rarely change what is rounded."""
_UNLIKE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}
"""Of the largest number."""


class CardPlainNorm(CardForward):
    """The `forward` of one norm without a weight."""

    def __init__(self, module: Any, kernel: CudaNorm, place: torch.device, epsilon: float, form: NormForm) -> None:
        super().__init__(module)
        self.epsilon, self.form, self._kernel, self._place = epsilon, form, kernel, place

    @property
    def weight(self) -> torch.Tensor | None:
        return None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[.., width] -> the same, normed."""
        if not self._takes(hidden_states):
            result: torch.Tensor = self.in_library(hidden_states)
            return result
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return self._kernel(rows, self.weight, self.epsilon, self.form).view(hidden_states.shape)

    def _takes(self, hidden_states: torch.Tensor) -> bool:
        return hidden_states.dtype in STATES and hidden_states.device == self._place and hidden_states.numel() > 0


class CardNorm(CardPlainNorm):
    """The `forward` of one norm.  The sum before it can be part of the launch: who adds tells the norm, and finds its
    result there later."""

    def __init__(self, module: Any, kernel: CudaNorm, epsilon: float, form: NormForm) -> None:
        super().__init__(module, kernel, module.weight.device, epsilon, form)
        self._sum: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[width]."""
        weight: torch.Tensor = self._module.weight
        return weight

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states is self._sum and self._normed is not None:
            normed, self._sum, self._normed = self._normed, None, None
            return normed
        return super().__call__(hidden_states)

    def add(self, hidden_states: torch.Tensor, more: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """A sum of tensors [.., width], the second times `scale`; its norm is computed with it for who asks next."""
        if not (self._takes(hidden_states) and more.shape == hidden_states.shape and more.dtype == hidden_states.dtype):
            return scaled_sum(hidden_states, more, scale)
        rows, added = (each.reshape(-1, self.weight.numel()).contiguous() for each in (hidden_states, more))
        both, normed = self._kernel.add(rows, added, self.weight, self.epsilon, self.form, scale)
        self._sum, self._normed = both.view(hidden_states.shape), normed.view(hidden_states.shape)
        return self._sum


def scaled_sum(hidden_states: torch.Tensor, more: torch.Tensor, scale: float) -> torch.Tensor:
    """hidden_states + more * scale, by operators."""
    return hidden_states + (more if scale == 1 else more * scale)


def speed_up_norms(model: Any) -> int:
    """Norms with a weight, and those without one, which lie where other parts of the module do that they are in."""
    beside = dict[Any, torch.Tensor]()
    for parent in model.modules():
        weight = next((p for p in parent.parameters() if p.is_floating_point()), None)
        if weight is not None and weight.dtype in STATES:
            beside.update((norm, weight) for norm in parent.children() if _is_plain(norm))

    def plain(norm: Any, kernel: CudaNorm) -> Taken:
        weight = beside[norm]
        made = CardPlainNorm(norm, kernel, weight.device, norm.eps, NormForm(rounds_once=True))
        x = torch.randn(_ROWS, _PLAIN_WIDTH, generator=torch.Generator().manual_seed(3)).to(weight.device, weight.dtype)
        return [(norm, made)] if is_alike(made(x), norm.forward(x)) else []

    weighted = Fused("norms", CudaNorm, _place_of_norm, _norm).speed_up(model.modules())
    return weighted + Fused("norms", CudaNorm, lambda norm: beside[norm].device, plain).speed_up(beside)


def _is_plain(norm: Any) -> bool:
    return (
        type(norm).__name__.endswith("RMSNorm")
        and not any(True for _ in norm.parameters())
        and not getattr(norm, "with_scale", True)
        and isinstance(getattr(norm, "eps", None), float)
    )


def _place_of_norm(module: Any) -> torch.device | None:
    """Of one with a weight and nothing else."""
    if (
        not type(module).__name__.endswith("RMSNorm")
        or [name for name, _ in module.named_parameters()] != ["weight"]
        or module.weight.dim() != 1
        or module.weight.dtype not in STATES
        or len(inspect.signature(module.forward).parameters) != 1  # one with a gate
        or not isinstance(_epsilon_of(module), float)
    ):
        return None
    place: torch.device = module.weight.device
    return place


def _epsilon_of(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norm(module: Any, kernel: CudaNorm) -> Taken:
    weight = module.weight
    x = torch.randn(_ROWS, weight.numel(), generator=torch.Generator().manual_seed(3)).to(weight.device, weight.dtype)
    more = x.flip(1)
    wanted, of_sum = module.forward(x), module.forward(x + more)
    for form in _FORMS:
        made = CardNorm(module, kernel, _epsilon_of(module), form)
        both = made.add(x, more)
        if is_alike(made(x), wanted) and torch.equal(both, x + more) and is_alike(made(both), of_sum):
            return [(module, made)]
    return []


def is_alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a kernel gives what operators do, of the same type: mostly the same bits, if rounded."""
    limit = _UNLIKE[wanted.dtype] * wanted.float().abs().max()
    is_near = found.shape == wanted.shape and bool((found.float() - wanted.float()).abs().max() <= limit)
    same = wanted.dtype == torch.float32 or (is_near and (found == wanted).float().mean().item() >= _SAME)
    return found.dtype == wanted.dtype and is_near and same


# --- residual sums ----------------------------------------------------------------------------------------------------

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm")
_MLPS = ("mlp", "block_sparse_moe")
_MULTIPLIER = "residual_multiplier"


class CardLayer(CardForward):
    """The `forward` of one decoder layer whose residual sums are part of the norms that follow them.

    A layer of the common kind has two norms, attention and an MLP, and adds what each of these makes to its input, in
    some families (Granite) times a number.  Whether it is one is tried with something simple in the places of attention
    and MLP.

    Args:
        following: norm of what it returns, if any: the next layer's.
    """

    def __init__(self, layer: Any, following: CardNorm | None) -> None:
        super().__init__(layer)
        self._middle: CardNorm = layer.post_attention_layernorm.forward
        self.following, self._mlp = following, _mlp_of(layer)
        self._scale = float(getattr(layer, _MULTIPLIER, 1.0))

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the library's layer."""
        if args or not 0 < hidden_states.numel() <= FEW_ROWS * self._middle.weight.numel():
            return self.in_library(hidden_states, *args, **kwargs)
        layer, scale = self._module, self._scale
        attended = _own(layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs))
        hidden_states = self._middle.add(hidden_states, attended, scale)
        made = _own(self._mlp(layer.post_attention_layernorm(hidden_states)))
        if self.following is None:
            return scaled_sum(hidden_states, made, scale)
        return self.following.add(hidden_states, made, scale)


def _mlp_of(layer: Any) -> Any:
    """The MLP of a layer, or the experts in its place; `None` where there is not one."""
    found = [getattr(layer, name) for name in _MLPS if hasattr(layer, name)]
    return found[0] if len(found) == 1 else None


def _own(result: Any) -> torch.Tensor:
    """Without what some modules return beside it."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def speed_up_layers(layers: Sequence[Any], last_norm: Any) -> int:
    """Layers whose norms are kernels'.

    Args:
        layers: of a model, in order.
        last_norm: module behind them, or `None`.
    """
    norms = [getattr(layer, _PARTS[0], None) for layer in layers[1:]] + [last_norm]
    behind = dict(zip(layers, norms[: len(layers)], strict=True))  # there may be no such layers

    def summed(layer: Any, _kernel: CudaNorm) -> Taken:
        following = own_forward(behind[layer])
        is_there = isinstance(following, CardNorm) and following.weight.device == _place_of_layer(layer)
        made = CardLayer(layer, following if is_there else None)
        return [(layer, made)] if any(_adds_alike(made, layer, is_tuple) for is_tuple in (False, True)) else []

    return Fused("residual sums", CudaNorm, _place_of_layer, summed).speed_up(layers)


def _place_of_layer(layer: Any) -> torch.device | None:
    norms = [own_forward(getattr(layer, name, None)) for name in (_PARTS[0], _PARTS[2])]
    if not all(isinstance(norm, CardNorm) for norm in norms) or not hasattr(layer, _PARTS[1]) or _mlp_of(layer) is None:
        return None
    place: torch.device = norms[1].weight.device
    return place


def _adds_alike(made: CardLayer, layer: Any, is_tuple: bool) -> bool:
    weight, following = layer.post_attention_layernorm.weight, made.following
    x = torch.randn(1, 3, weight.numel(), generator=torch.Generator().manual_seed(6)).to(weight.device, weight.dtype)
    given = dict.fromkeys(("attention_mask", "position_embeddings", "cache", "position_ids"))
    attended, computed = _Stub(0.75, is_tuple=True), _Stub(1.25, is_tuple=is_tuple)
    try:
        with replaced([(layer.self_attn, attended), (_mlp_of(layer), computed)]):
            wanted, found = layer.forward(x, **given), made(x, **given)
    except (ValueError, TypeError, AttributeError):  # it wants a tuple of its MLP, or to be given something else
        return False
    is_asked_alike = all(stub.calls[0] == stub.calls[1] for stub in (attended, computed))
    if not is_asked_alike or not isinstance(wanted, torch.Tensor) or not torch.equal(found, wanted):
        return False
    return following is None or torch.equal(following(found), following(wanted))


class _Stub:
    """In the place of attention, or of an MLP: a multiple of what it gets.

    Attributes:
        calls: the names of what it was given, one by one.
    """

    def __init__(self, factor: float, *, is_tuple: bool) -> None:
        self._factor, self._is_tuple = factor, is_tuple
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        self.calls.append((len(args), *sorted(name for name in kwargs if name != "use_cache")))
        hidden = args[0] if args else kwargs["hidden_states"]
        result = hidden * self._factor
        return (result, None) if self._is_tuple else result


# --- angles -----------------------------------------------------------------------------------------------------------

ANGLES_KERNEL = Kernel("angles.cu")


class CudaAngles(OnCard):
    """The angles by which a model rotates queries and keys, of few tokens by one launch for all its layers."""

    def __call__(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype, times: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, times `scale`, of each position by each frequency.

        Args:
            positions: int64 [rows], contiguous.
            frequencies: float32 [pairs], contiguous.
            dtype: of the results, one in `STATES`.
            times: how often a row's angles are repeated.

        Returns:
            Both [rows, times x pairs], contiguous.
        """
        shape = len(positions), times * len(frequencies)
        cosines, sines = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
        self._launch(positions, frequencies, cosines, sines, scale, times=times, step=1)
        return cosines, sines

    def turned(self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
        """The same as complex numbers, complex64 [rows, pairs]."""
        both = torch.empty(len(positions), len(frequencies), 2, dtype=torch.float32, device=positions.device)
        self._launch(positions, frequencies, both, both.flatten()[1:], scale, times=1, step=2)
        return torch.view_as_complex(both)

    def _launch(
        self,
        positions: torch.Tensor,
        frequencies: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        scale: float,
        *,
        times: int,
        step: int,
    ) -> None:
        self.start(
            ANGLES_KERNEL, (len(positions), 1, 1), positions=positions, frequencies=frequencies, cosines=cosines,
            sines=sines, pairs=len(frequencies), times=times, step=step, states=cosines.dtype, scale=scale,
        )  # fmt: skip


_TRIED = ((0, 3, 77, 1003, 100_003),)
_CHANGING = ("dynamic", "longrope")
"""Kinds of angles whose frequencies depend on how long the context is."""
_COMPLEX = 0
_TIMES = (2, 1, _COMPLEX)
"""How often the angles of a token are given: for both halves of a head, or once; or as complex numbers."""


class CardAngles(CardForward):
    """The `forward` of the module that makes cosines and sines of positions."""

    def __init__(self, module: Any, kernel: CudaAngles, times: int) -> None:
        super().__init__(module)
        self._kernel, self._times = kernel, times

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """States [B, T, hidden] and positions [B or 1, T] -> what the library's gives."""
        frequencies = self._module.inv_freq
        if (
            position_ids.dtype != torch.int64
            or position_ids.dim() != 2
            or not 0 < position_ids.numel() <= FEW_ROWS
            or x.dtype not in STATES
            or any(each.device != x.device for each in (position_ids, frequencies))
        ):
            return self.in_library(x, position_ids)
        rows, scale = position_ids.reshape(-1), float(self._module.attention_scaling)
        if self._times == _COMPLEX:
            return self._kernel.turned(rows, frequencies, scale).view(*position_ids.shape, -1)
        both = self._kernel(rows, frequencies, scale, x.dtype, self._times)
        return tuple(each.view(*position_ids.shape, -1) for each in both)


def speed_up_angles(module: Any, dtype: torch.dtype) -> bool:
    """The module that makes angles.

    Args:
        module: of the library, called with states and positions.
        dtype: of the model's states.
    """

    def found(module: Any, kernel: CudaAngles) -> Taken:
        positions = torch.tensor(_TRIED, device=module.inv_freq.device)
        x = torch.zeros(1, len(_TRIED[0]), 1, dtype=dtype, device=positions.device)
        wanted = module.forward(x, positions)
        made = (CardAngles(module, kernel, times) for times in _TIMES)
        return [(module, each) for each in made if _are_alike(each(x, positions), wanted)][:1]

    return Fused("angles", CudaAngles, lambda module: _place_of_angles(module, dtype), found).speed_up([module]) > 0


def _place_of_angles(module: Any, dtype: torch.dtype) -> torch.device | None:
    frequencies, kind = getattr(module, "inv_freq", None), str(getattr(module, "rope_type", ""))
    if (
        not isinstance(frequencies, torch.Tensor)
        or (frequencies.dim(), frequencies.dtype) != (1, torch.float32)
        or not isinstance(getattr(module, "attention_scaling", None), int | float)
        or any(each in kind for each in _CHANGING)
        or list(inspect.signature(module.forward).parameters) != ["x", "position_ids"]
        or dtype not in STATES
    ):
        return None
    return frequencies.device


def _are_alike(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and is_alike(*map(_as_real, (found, wanted)))
    return all(map(_are_alike, found, wanted))


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
