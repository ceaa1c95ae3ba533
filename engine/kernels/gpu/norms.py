"""Root mean square norms of a model on a card by one launch each, wherever that gives what the module gives."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.cuda.driver import nvidia_card
from engine.kernels.cuda.norm import STATES, CudaNorm

_log = logging.getLogger(__name__)

_ROWS = 3
_SAME = 0.95
"""Of all numbers have the same bits: sums in another order rarely change what is rounded."""
_LIKE = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class _Form:
    """What families mean by such a norm; see `CudaNorm`."""

    offset: float
    rounds_once: bool


_FORMS = (_Form(0.0, rounds_once=False), _Form(0.0, rounds_once=True), _Form(1.0, rounds_once=True))


def norm_of(device: torch.device) -> CudaNorm | None:
    """The kernel of a card, if it runs any."""
    card = nvidia_card(device)
    return CudaNorm(card) if card is not None else None


class CardNorm:
    """The `forward` of one norm.

    Attributes:
        in_library: the one that it takes the place of.
    """

    def __init__(self, module: Any, epsilon: float, kernel: CudaNorm, form: _Form) -> None:
        self.in_library = module.forward
        self._module, self._epsilon, self._kernel, self._form = module, epsilon, kernel, form

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[.., width] -> the same, normed."""
        weight = self._module.weight
        if hidden_states.dtype not in STATES or not hidden_states.numel() or weight.device != hidden_states.device:
            result: torch.Tensor = self.in_library(hidden_states)
            return result
        rows = hidden_states.reshape(-1, weight.numel())
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        form = self._form
        found = self._kernel(rows, weight, self._epsilon, offset=form.offset, rounds_once=form.rounds_once)
        return found.view(hidden_states.shape)


def speed_up_norms(model: Any) -> int:
    """Gives every norm that lies on a card with the kernel its forward, if that has been seen to give the same.

    Returns:
        How many.
    """
    count = 0
    for module in model.modules():
        epsilon = _epsilon_of(module)
        kernel = norm_of(module.weight.device) if epsilon is not None else None
        if epsilon is None or kernel is None:
            continue
        made = _made(module, epsilon, kernel)
        if made is not None:
            module.forward = made
            count += 1
    return count


def _epsilon_of(module: Any) -> float | None:
    """Of a norm with a weight and nothing else; `None` for any other module."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    if module.weight.dim() != 1 or module.weight.dtype not in STATES or "forward" in module.__dict__:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # one with a gate
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


@torch.inference_mode()
def _made(module: Any, epsilon: float, kernel: CudaNorm) -> CardNorm | None:
    weight = module.weight
    x = torch.randn(_ROWS, weight.numel(), generator=torch.Generator().manual_seed(3)).to(weight.device, weight.dtype)
    try:
        wanted = module.forward(x)
        for form in _FORMS:
            made = CardNorm(module, epsilon, kernel, form)
            found = made(x)
            same = (found == wanted).float().mean().item()
            alike = torch.allclose(found.float(), wanted.float(), rtol=_LIKE[x.dtype], atol=1e-6)
            if found.dtype == wanted.dtype and alike and (x.dtype == torch.float32 or same >= _SAME):
                return made
    except Exception:  # any compiler or driver error: the library's operators do it
        _log.warning("norms are not computed by a kernel on %s", weight.device, exc_info=True)
    return None
