"""Routers by the kernel in `router.cu`: logits, scores and the best experts of a few tokens in one launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher
from engine.kernels.cuda.norm import STATES
from engine.kernels.cuda.products import pointer

_THREADS, _EXPERTS_OF_BLOCK, _ROWS = 128, 4, 8
_NAMES = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
_MOST_EXPERTS, _MOST_GROUPS, _MOST_CHOSEN = 512, 32, 32
_ALIGNMENT = 16


class RouterArguments(ctypes.Structure):
    """`RouterArguments` in router.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "correction")),
        *((name, ctypes.c_void_p) for name in ("logits", "chosen", "shares", "arrived")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "experts", "per_token", "groups", "kept_groups")),
        *((name, ctypes.c_int) for name in ("states", "weight_states")),
        *((name, ctypes.c_int) for name in ("is_sigmoid", "rounds_logits", "normalises", "rounds_shares")),
        *((name, ctypes.c_float) for name in ("scale", "slack")),
    )


def router_kernels() -> list[Kernel]:
    """All that may be asked for."""
    states = (torch.bfloat16, torch.float16, torch.float32)
    return [_kernel(state, weight) for state in states for weight in dict.fromkeys((state, torch.float32))]


def _kernel(state: torch.dtype, weight: torch.dtype) -> Kernel:
    defines = (("SWITCHYARD_STATE", _NAMES[state]), ("SWITCHYARD_WEIGHT", _NAMES[weight]))
    return Kernel("router.cu", "router_kernel", _THREADS, defines)


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


class CudaRouter:
    """Routers on one card.  A step's calls must come one after the other: they share counters."""

    def __init__(self, card: Launcher) -> None:
        self._card = card
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
        arguments = RouterArguments(
            x=x.data_ptr(), weights=weight.data_ptr(), bias=pointer(bias), correction=pointer(correction),
            logits=logits.data_ptr(), chosen=chosen.data_ptr(), shares=shares.data_ptr(),
            arrived=self._counters(runs, x.device).data_ptr(), rows=rows, columns=columns, experts=experts,
            per_token=how.per_token, groups=how.groups, kept_groups=how.kept_groups, states=STATES[x.dtype],
            weight_states=STATES[weight.dtype], is_sigmoid=how.is_sigmoid, rounds_logits=how.rounds_logits,
            normalises=how.normalises, rounds_shares=how.rounds_shares, scale=how.scale,
            slack=how.slack,
        )  # fmt: skip
        self._card.launch(_kernel(x.dtype, weight.dtype), (-(-experts // _EXPERTS_OF_BLOCK), runs, 1), arguments)
        return logits, shares, chosen

    def _counters(self, count: int, device: torch.device) -> torch.Tensor:
        if self._arrived is None or len(self._arrived) < count:
            self._arrived = torch.zeros(max(64, count), dtype=torch.int32, device=device)
        return self._arrived
