"""Root mean square norms of a model on a card by one launch each, wherever that gives what the module gives.

The residual sum before a norm can be part of the launch: who adds tells the norm, and finds its result there later.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.families.library import own_forward, take_over
from engine.kernels.cuda.compiled import STATES, Kernel
from engine.kernels.cuda.driver import OnCard, on_card

NORM_KERNEL = Kernel("norm.cu")


class CudaNorm(OnCard):
    """Norms on one card."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float, rounds_once: bool
    ) -> torch.Tensor:
        """x / sqrt(mean(x^2) + epsilon) * (weight + offset), in fp32.

        Args:
            x: [rows, width] of a type in `STATES`, elements of a row contiguous.
            weight: [width], contiguous, of a type in `STATES`; `None`: there is none, and no offset.
            rounds_once: whether the weight multiplies before rounding to x's type, not after.

        Returns:
            [rows, width], contiguous, of x's type.
        """
        out = x.new_empty(x.shape)
        self._launch(x, weight, out, epsilon=epsilon, offset=offset, rounds_once=rounds_once)
        return out

    def add(
        self,
        x: torch.Tensor,
        added: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        offset: float,
        rounds_once: bool,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + added * scale, each rounded to x's type, and its norm.

        Args:
            added: as x, contiguous.
        """
        out, both = x.new_empty(x.shape), x.new_empty(x.shape)
        self._launch(x, weight, out, added, both, epsilon=epsilon, offset=offset, rounds_once=rounds_once, scale=scale)
        return both, out

    def _launch(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        added: torch.Tensor | None = None,
        both: torch.Tensor | None = None,
        *,
        epsilon: float,
        offset: float,
        rounds_once: bool,
        scale: float = 1.0,
    ) -> None:
        rows, width = x.shape
        self.start(
            NORM_KERNEL, (rows, 1, 1), x=x, added=added, sum=both, out=out, weights=weight, step=x.stride(0),
            width=width, states=x.dtype, weight_states=x.dtype if weight is None else weight.dtype,
            rounds_once=rounds_once, epsilon=epsilon, offset=offset, added_scale=scale,
        )  # fmt: skip


_log = logging.getLogger(__name__)

_ROWS = 3
_PLAIN_WIDTH = 65
_SAME = 0.95
"""Of all numbers have the same bits: sums in another order rarely change what is rounded."""
_UNLIKE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}
"""Of the largest number."""


@dataclass(frozen=True, slots=True)
class NormForm:
    """What families mean by such a norm; see `CudaNorm`."""

    offset: float
    rounds_once: bool


_FORMS = (NormForm(0.0, rounds_once=False), NormForm(0.0, rounds_once=True), NormForm(1.0, rounds_once=True))


class CardNorm:
    """The `forward` of one norm."""

    def __init__(self, module: Any, epsilon: float, kernel: CudaNorm, form: NormForm) -> None:
        self.in_library = module.forward
        self.epsilon, self.form = epsilon, form
        self._module, self._kernel = module, kernel
        self._sum: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[width]."""
        weight: torch.Tensor = self._module.weight
        return weight

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[.., width] -> the same, normed."""
        if hidden_states is self._sum and self._normed is not None:
            normed, self._sum, self._normed = self._normed, None, None
            return normed
        weight = self.weight
        if not self._takes(hidden_states):
            result: torch.Tensor = self.in_library(hidden_states)
            return result
        rows = hidden_states.reshape(-1, weight.numel())
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        form = self.form
        found = self._kernel(rows, weight, self.epsilon, offset=form.offset, rounds_once=form.rounds_once)
        return found.view(hidden_states.shape)

    def add(self, hidden_states: torch.Tensor, more: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """A sum of tensors [.., width], the second times `scale`; its norm is computed with it for who asks next."""
        if not (self._takes(hidden_states) and more.shape == hidden_states.shape and more.dtype == hidden_states.dtype):
            return scaled_sum(hidden_states, more, scale)
        rows, added = (each.reshape(-1, self.weight.numel()).contiguous() for each in (hidden_states, more))
        form = self.form
        both, normed = self._kernel.add(
            rows, added, self.weight, self.epsilon, offset=form.offset, rounds_once=form.rounds_once, scale=scale
        )
        self._sum, self._normed = both.view(hidden_states.shape), normed.view(hidden_states.shape)
        return self._sum

    def _takes(self, hidden_states: torch.Tensor) -> bool:
        known = hidden_states.dtype in STATES and self.weight.device == hidden_states.device
        return known and hidden_states.numel() > 0


class CardPlainNorm:
    """The `forward` of one norm without a weight."""

    def __init__(self, module: Any, kernel: CudaNorm, place: torch.device) -> None:
        self.in_library = module.forward
        self._epsilon, self._kernel, self._place = float(module.eps), kernel, place

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[.., width] -> the same, normed."""
        if hidden_states.dtype not in STATES or hidden_states.device != self._place or not hidden_states.numel():
            result: torch.Tensor = self.in_library(hidden_states)
            return result
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return self._kernel(rows, None, self._epsilon, offset=0.0, rounds_once=True).view(hidden_states.shape)


def scaled_sum(hidden_states: torch.Tensor, more: torch.Tensor, scale: float) -> torch.Tensor:
    """hidden_states + more * scale, by operators."""
    return hidden_states + (more if scale == 1 else more * scale)


def speed_up_norms(model: Any) -> int:
    """Gives every norm that lies on a card with the kernel its forward, if that has been seen to give the same."""
    weighted = take_over(_made_in(model))
    return weighted + sum(take_over(_plain_in(parent)) for parent in model.modules())


def _made_in(model: Any) -> Iterator[tuple[Any, CardNorm]]:
    for module in model.modules():
        epsilon = _epsilon_of(module)
        kernel = on_card(module.weight.device, CudaNorm) if epsilon is not None else None
        if epsilon is None or kernel is None:
            continue
        made = _made(module, epsilon, kernel)
        if made is not None:
            yield module, made


@torch.inference_mode()
def _plain_in(parent: Any) -> Iterator[tuple[Any, CardPlainNorm]]:
    """The same of the norms without a weight right in a module, which lie where its other parts do."""
    beside = next((p for p in parent.parameters() if p.is_floating_point()), None)
    kernel = on_card(beside.device, CudaNorm) if beside is not None and beside.dtype in STATES else None
    if beside is None or kernel is None:
        return
    for norm in parent.children():
        if (
            not type(norm).__name__.endswith("RMSNorm")
            or any(True for _ in norm.parameters())
            or getattr(norm, "with_scale", True)
            or not isinstance(getattr(norm, "eps", None), float)
            or own_forward(norm) is not None
        ):
            continue
        made = CardPlainNorm(norm, kernel, beside.device)
        x = torch.randn(_ROWS, _PLAIN_WIDTH, generator=torch.Generator().manual_seed(3)).to(beside.device, beside.dtype)
        try:
            if is_alike(made(x), norm.forward(x)):
                yield norm, made
        except Exception:  # any compiler or driver error: the library's operators do it
            _log.warning("norms are not computed by a kernel on %s", beside.device, exc_info=True)


def _epsilon_of(module: Any) -> float | None:
    """Of a norm with a weight and nothing else; `None` for any other module."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    if module.weight.dim() != 1 or module.weight.dtype not in STATES or own_forward(module) is not None:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # one with a gate
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


@torch.inference_mode()
def _made(module: Any, epsilon: float, kernel: CudaNorm) -> CardNorm | None:
    weight = module.weight
    x = torch.randn(_ROWS, weight.numel(), generator=torch.Generator().manual_seed(3)).to(weight.device, weight.dtype)
    more = x.flip(1)
    try:
        wanted, of_sum = module.forward(x), module.forward(x + more)
        for form in _FORMS:
            made = CardNorm(module, epsilon, kernel, form)
            both = made.add(x, more)
            if is_alike(made(x), wanted) and torch.equal(both, x + more) and is_alike(made(both), of_sum):
                return made
    except Exception:  # any compiler or driver error: the library's operators do it
        _log.warning("norms are not computed by a kernel on %s", weight.device, exc_info=True)
    return None


def is_alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether a kernel gives what operators do, of the same type: mostly the same bits, if rounded."""
    limit = _UNLIKE[wanted.dtype] * wanted.float().abs().max()
    is_near = found.shape == wanted.shape and bool((found.float() - wanted.float()).abs().max() <= limit)
    same = wanted.dtype == torch.float32 or (is_near and (found == wanted).float().mean().item() >= _SAME)
    return found.dtype == wanted.dtype and is_near and same
