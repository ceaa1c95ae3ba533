"""Routers of a model on a card by one launch each, wherever one way of choosing gives what the module gives.

Families that describe their router (`engine.families.family.Router`) say which way that is.  Of others those modules
are tried that look like a router, in the ways that their attributes allow.  What is added to scores for the choice is
the router's own, in a module of it (ERNIE 4.5), or given with the hidden states (MiniMax M2).  The weight may be that
of a linear layer within (HunYuan).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from engine.families import family_at
from engine.families.library import own_forward
from engine.kernels.cuda.compiled import STATES, Kernel
from engine.kernels.cuda.driver import Launcher, OnCard
from engine.kernels.gpu.modules import FEW_ROWS, CardForward, Fused, Taken

_EXPERTS_OF_BLOCK, _ROWS = 4, 8
_NAMES = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
_MOST_EXPERTS, _MOST_GROUPS, _MOST_CHOSEN = 512, 32, 32
_ALIGNMENT = 16


def router_kernels() -> list[Kernel]:
    """All that may be asked for."""
    states = (torch.bfloat16, torch.float16, torch.float32)
    return [_kernel(state, weight) for state in states for weight in dict.fromkeys((state, torch.float32))]


def _kernel(state: torch.dtype, weight: torch.dtype) -> Kernel:
    defines = (("SWITCHYARD_STATE", _NAMES[state]), ("SWITCHYARD_WEIGHT", _NAMES[weight]))
    return Kernel("router.cu", defines)


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen by their logits.

    Attributes:
        per_token: experts of each token.
        is_sigmoid: scores are sigmoids of logits, else their softmax.
        groups, kept_groups: experts are chosen among those of the best groups.
        rounds_logits: whether logits are rounded to the hidden states' type.
        normalises: whether the shares of the chosen are made to sum to 1.
        rounds_shares: whether shares are rounded to the hidden states' type.
        scale: of shares.
        slack: above 0 experts are chosen as SparseMixer does (Liu et al. 2024, "GRIN", section 2): one after the other,
            each with its share in the softmax of those left whose logits are not smaller by more than this, relatively.
            Of all others then `per_token`, `rounds_logits` and `rounds_shares` count.
    """

    per_token: int
    is_sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    rounds_logits: bool = True
    normalises: bool = False
    rounds_shares: bool = False
    scale: float = 1.0
    slack: float = 0.0

    def suits(self, experts: int) -> bool:
        """Whether the kernel chooses so from this many."""
        per_group = experts // max(self.groups, 1)
        return (
            experts <= _MOST_EXPERTS
            and 0 < self.per_token <= min(_MOST_CHOSEN, self.kept_groups * per_group)
            and 0 < self.kept_groups <= self.groups <= _MOST_GROUPS
            and experts % self.groups == 0
        )


class CudaRouter(OnCard):
    """Routers on one card.  A step's calls must come one after the other: they share counters."""

    def __init__(self, card: Launcher) -> None:
        super().__init__(card)
        self._arrived: torch.Tensor | None = None

    @staticmethod
    def takes(states: torch.dtype, weight: torch.Tensor) -> bool:
        """Whether there is a kernel for weights [experts, columns] and hidden states of these types."""
        return (
            states in STATES
            and weight.dtype in (states, torch.float32)
            and weight.is_contiguous()
            and weight.data_ptr() % _ALIGNMENT == 0
        )

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        how: Routing,
        bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chooses experts for a few tokens.

        Args:
            x: [rows, columns], contiguous.
            weight: [experts, columns] that `takes` says yes to.
            bias: [experts], added to logits, of the weight's type.
            correction: float32 [experts], added to scores for the choice alone.

        Returns:
            Logits [rows, experts] and shares [rows, k], both float32, and ids int64 [rows, k], the best first: the
            earlier of equals.
        """
        x = x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()
        (rows, columns), experts = x.shape, len(weight)
        logits, shares = (x.new_empty(rows, width, dtype=torch.float32) for width in (experts, how.per_token))
        chosen = x.new_empty(rows, how.per_token, dtype=torch.int64)
        runs = -(-rows // _ROWS)
        self.start(
            _kernel(x.dtype, weight.dtype), (-(-experts // _EXPERTS_OF_BLOCK), runs, 1), x=x, weights=weight, bias=bias,
            correction=correction, logits=logits, chosen=chosen, shares=shares, arrived=self._counters(runs, x.device),
            rows=rows, columns=columns, experts=experts, states=x.dtype, weight_states=weight.dtype, **asdict(how),
        )  # fmt: skip
        return logits, shares, chosen

    def _counters(self, count: int, device: torch.device) -> torch.Tensor:
        if self._arrived is None or len(self._arrived) < count:
            self._arrived = torch.zeros(max(64, count), dtype=torch.int32, device=device)
        return self._arrived


_TRIED_ROWS = 8
_SAME = 0.9
"""Of the ids: sums in another order change few of the choices between near equals."""


_LINEAR = "wg"
_JITTER = "router_jitter_noise"
"""Of SparseMixer (Phi-3.5): logits that are smaller by more than twice this are not compared with the largest."""
_STATICS = "moe_statics"
_CORRECTIONS = ("e_score_correction_bias", f"{_STATICS}.e_score_correction_bias")


class CardRouter(CardForward):
    """The `forward` of one router."""

    def __init__(self, module: Any, kernel: CudaRouter, how: Routing) -> None:
        super().__init__(module)
        self.how, self._kernel = how, kernel
        self._correction: tuple[torch.Tensor, torch.Tensor] | None = None
        """What is added to scores, as it is given and as the kernel reads it."""

    def __call__(self, hidden_states: torch.Tensor, e_score_correction_bias: torch.Tensor | None = None) -> Any:
        """[.., hidden] -> logits and shares, both in fp32 with the module's values, and ids."""
        given = () if e_score_correction_bias is None else (e_score_correction_bias,)
        holder = _holder(self._module)
        weight = holder.weight
        tokens = hidden_states.reshape(-1, weight.shape[1])
        if (
            not 0 < len(tokens) <= FEW_ROWS
            or weight.device != tokens.device
            or not self._kernel.takes(tokens.dtype, weight)
        ):
            return self.in_library(hidden_states, *given)
        bias = getattr(holder, "bias", None)
        correction = next((self._read(each) for each in (*given, *_corrections(self._module))), None)
        return self._kernel(tokens.contiguous(), weight, self.how, bias, correction)

    def _read(self, correction: torch.Tensor) -> torch.Tensor:
        if self._correction is None or self._correction[0] is not correction:
            self._correction = correction, correction.float().reshape(-1)
        return self._correction[1]


def speed_up_routers(model: Any) -> int:
    """Modules that look like a router."""

    def place(module: Any) -> torch.device | None:
        return _holder(module).weight.device if _is_router(module) else None

    return Fused("routing", CudaRouter, place, _made).speed_up(model.modules())


def _holder(module: Any) -> Any:
    """What has a router's weight and bias: itself, or its only linear layer."""
    inner = getattr(module, _LINEAR, None)
    return inner if type(inner) is torch.nn.Linear and own_forward(inner) is None else module


def _is_router(module: Any) -> bool:
    holder = _holder(module)
    weight = getattr(holder, "weight", None)
    prefix = "" if holder is module else f"{_LINEAR}."
    tensors = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    given = list(inspect.signature(module.forward).parameters)[1:]
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and weight.dtype in STATES
        and isinstance(getattr(module, "top_k", None), int)
        and tensors <= {f"{prefix}weight", f"{prefix}bias", *_CORRECTIONS}
        and all(each.numel() == len(weight) for each in _corrections(module))
        and given in ([], [_CORRECTIONS[0]])
    )


def _corrections(module: Any) -> list[torch.Tensor]:
    """Of its own, [experts] in any shape: added to scores for the choice alone."""
    places = (module, getattr(module, _STATICS, None))
    values = (getattr(place, _CORRECTIONS[0], None) for place in places)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _ways(module: Any) -> Iterator[Routing]:
    """In which a module may choose: the family's own, or those that its attributes allow."""
    scale = float(getattr(module, "routed_scaling_factor", 1.0))
    groups = getattr(module, "num_group", getattr(module, "n_group", None)) or 1
    kept = getattr(module, "topk_group", None) or groups
    path = family_at(type(module).__module__).fast_path
    if path is not None and path.block:
        how = path.router
        is_grouped = how.groups is not None and (
            how.groups_if is None or getattr(module, how.groups_if[0]) == how.groups_if[1]
        )
        normalises = getattr(module, how.normalise) if isinstance(how.normalise, str) else how.normalise
        yield Routing(
            per_token=module.top_k,
            is_sigmoid=how.scoring == "sigmoid",
            groups=groups if is_grouped else 1,
            kept_groups=kept if is_grouped else 1,
            rounds_logits=how.bf16_logits,
            normalises=bool(normalises),
            rounds_shares=how.bf16_shares,
            scale=float(getattr(module, how.scale)) if how.scale else 1.0,
        )
        return
    jitter = getattr(module, _JITTER, None)
    if isinstance(jitter, float) and jitter > 0:
        yield Routing(module.top_k, rounds_shares=True, slack=2 * jitter)
    for is_sigmoid, rounds_logits, normalises, rounds_shares in product((True, False), repeat=4):
        yield Routing(module.top_k, is_sigmoid, groups, kept, rounds_logits, normalises, rounds_shares, scale=scale)


def _made(module: Any, kernel: CudaRouter) -> Taken:
    weight = _holder(module).weight
    generator = torch.Generator().manual_seed(5)
    asks = len(inspect.signature(module.forward).parameters) > 1
    given = [torch.rand(len(weight), generator=generator).to(weight.device)] if asks else []
    tried: list[tuple[torch.Tensor, Any]] = []
    for dtype in dict.fromkeys((weight.dtype, torch.bfloat16)):  # fp32 weights may be those of a model in bf16
        x = torch.randn(_TRIED_ROWS, weight.shape[1], generator=generator).to(weight.device, dtype)
        if not kernel.takes(dtype, weight):
            continue
        try:
            tried.append((x, module.forward(x, *given)))
        except RuntimeError:  # not of this type
            continue
    for how in _ways(module) if tried else ():
        made = CardRouter(module, kernel, how)
        # What is rounded to the states' type shows in the narrower one alone.
        if how.suits(len(weight)) and all(_agree(made(x, *given), wanted, x.dtype) for x, wanted in tried):
            return [(module, made)]
    return []


def _agree(found: tuple[torch.Tensor, ...], wanted: Any, dtype: torch.dtype) -> bool:
    """Whether logits are alike, nearly all experts the same, and their shares, too."""
    if not (isinstance(wanted, tuple) and len(wanted) == 3 and wanted[2].shape == found[2].shape):
        return False
    logits, shares, ids = wanted
    rough = 1e-4 if dtype == torch.float32 else 0.02
    if logits.shape != found[0].shape or not torch.allclose(found[0], logits.float(), rtol=rough, atol=rough):
        return False
    experts = logits.shape[1]
    mine, its = (
        shares.new_zeros(len(logits), experts, dtype=torch.float32).scatter(1, at, by.float())
        for at, by in ((found[2], found[1]), (ids, shares))
    )
    both = (mine != 0) & (its != 0)
    same = both.sum() / ids.numel()
    limit = 1e-4 if dtype == torch.float32 else 0.01
    close = (mine - its).abs() <= limit * its.abs() + 1e-6
    return bool(same >= _SAME) and bool((close | ~both).all())
