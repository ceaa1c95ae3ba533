"""What a kernel for expert computation is, so that another can take its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from engine.formats.tiles import Pairing, TiledMatrix, TiledShape
from engine.kernels.activation import Activation, activation_of


class RecordPart(Protocol):
    """One tensor of an expert's record; `offset` in bytes from the record's start."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def offset(self) -> int: ...


class RecordFormat(Protocol):
    """Where the parts of an expert lie, in `nbytes`; `unquantised` is the layout of the same expert in a checkpoint."""

    @property
    def parts(self) -> Sequence[RecordPart]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def unquantised(self) -> RecordFormat: ...


@runtime_checkable
class QuantisedFormat(RecordFormat, Protocol):
    """The format of records whose matrices are in tiles (`engine.experts.quantised_layout` has it)."""

    @property
    def pairing(self) -> Pairing: ...
    def is_tiled(self, name: str) -> bool: ...
    def tiled_shape(self, name: str) -> TiledShape: ...
    def matrix(self, rows: Mapping[str, Sequence[torch.Tensor]], name: str, expert: int) -> TiledMatrix: ...


class LayerRecords(Protocol):
    """The records of one layer's experts, as kernels see them (`engine.experts.bank.BankLayer` is one).

    `pieces` are uint8 [some, nbytes], one after the other all E records; `rows` has each part as a view [*shape] for
    each expert.  If there is one piece only, `stacked` has them as a view [E, *shape].
    """

    @property
    def layout(self) -> RecordFormat: ...
    @property
    def pieces(self) -> Sequence[torch.Tensor]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def stacked(self) -> Mapping[str, torch.Tensor]: ...
    @property
    def rows(self) -> Mapping[str, Sequence[torch.Tensor]]: ...


class ExpertKernel(Protocol):
    """Computes the experts of one layer; made once per layer, bound to its records."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, k], [T, k], all on the records' device -> [T, H] of the type of `hidden_states`."""


def rows_at_once(kernel: ExpertKernel) -> int | None:
    """How many visits a kernel wants to be given at a time, if it has an opinion."""
    wanted: int | None = getattr(kernel, "rows_at_once", None)
    return wanted


def is_capturable(kernel: ExpertKernel) -> bool:
    """Whether a kernel waits for nothing, so that a card can be made to repeat a step with it in it."""
    return bool(getattr(kernel, "is_capturable", False))


@dataclass(frozen=True)
class ExpertMath:
    """What an expert of a module computes, apart from its weights.

    Attributes:
        first: name of the first matrix, `gate_up_proj` or `up_proj`; `first_bias`, `down_bias`: names or `None`.
        gate: [.., 2I] -> [.., I] (or [.., I] -> [.., I] if there is no gate); elementwise along the leading dimensions.
        is_silu_gate: whether `gate` is the usual silu(first half) * second half, which kernels may fuse.
        norm: applied to each expert's output, or `None`.
        activation: what `gate` is, where native kernels know it.
    """

    first: str
    first_bias: str | None
    down_bias: str | None
    gate: Callable[[torch.Tensor], torch.Tensor]
    is_silu_gate: bool
    norm: Callable[[torch.Tensor], torch.Tensor] | None
    activation: Activation | None = None

    @classmethod
    def of(cls, module: Any) -> ExpertMath:
        """Reads the attributes of the library's experts interface."""
        first = "gate_up_proj" if module.has_gate else "up_proj"
        gate = module._apply_gate if module.has_gate else module.act_fn
        default_gate = getattr(type(module), "_apply_gate", None)
        is_silu = (
            module.has_gate
            and getattr(default_gate, "__name__", "") == "_default_apply_gate"
            and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        )
        return cls(
            first=first,
            first_bias=f"{first}_bias" if module.has_bias else None,
            down_bias="down_proj_bias" if module.has_bias else None,
            gate=gate,
            is_silu_gate=is_silu,
            norm=module.post_expert_norm if module.has_post_expert_norm else None,
            activation=activation_of(module),
        )
