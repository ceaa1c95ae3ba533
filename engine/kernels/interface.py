"""The interface of kernels that compute experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, Protocol, cast

import torch

from engine.families import family_at
from engine.families.family import ClampedGate
from engine.families.library import gate_of, gates_as_usual
from engine.formats.tiles import Pairing, RecordLayout


class ActivationKind(IntEnum):
    """Numbered as in switchyard_kernels.h."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4
    CLAMPED_SIGMOID = 5


@dataclass(frozen=True)
class Activation:
    """act(gate) * up, or act(x) without a gate.

    Attributes:
        pairing: layout of gate and up in the first matrix; `PLAIN` if there is no gate.
        limit: first clamps the gate to at most this, and up to +-this.
        alpha: of `CLAMPED_SIGMOID`: (up + 1) * gate * sigmoid(alpha * gate).
    """

    kind: ActivationKind
    pairing: Pairing
    limit: float = math.inf
    alpha: float = 1.0


_FUNCTIONS = {
    "SiLU": ActivationKind.SILU,
    "SiLUActivation": ActivationKind.SILU,
    "GELUActivation": ActivationKind.GELU,
    "GELUTanh": ActivationKind.GELU_TANH,
    "ReLU": ActivationKind.RELU,
    "ReLUSquaredActivation": ActivationKind.RELU_SQUARED,
    "silu": ActivationKind.SILU,
}


def kind_of(function: object) -> ActivationKind | None:
    """What a module of the library, or a function of torch, that computes an activation is called here."""
    return _FUNCTIONS.get(getattr(function, "__name__", type(function).__name__))


def activation_of(module: Any) -> Activation | None:
    """The activation of an experts module, or `None` if only the module itself can compute it."""
    if not module.has_gate:
        kind = kind_of(getattr(module, "act_fn", None))
        return None if kind is None else Activation(kind, Pairing.PLAIN)
    if gates_as_usual(module):
        kind = kind_of(getattr(module, "act_fn", None))
        return None if kind is None else Activation(kind, Pairing.HALVES)
    own = family_at(str(getattr(gate_of(module), "__module__", ""))).gate
    return None if own is None else _clamped(module, own)


def activation_of_mlp(mlp: Any, attribute: str = "act_fn") -> Activation | None:
    """The same of a dense MLP: gate and up rows are apart or, in a family with a gate of its own, in one matrix.

    Args:
        attribute: what computes it; empty: it is silu.
    """
    own = family_at(type(mlp).__module__).gate
    if not hasattr(mlp, "gate_up_proj"):
        if own is not None and own.pairing == "halves" and hasattr(mlp, own.limit):
            return _clamped(mlp, own)
        kind = kind_of(getattr(mlp, attribute, None)) if attribute else ActivationKind.SILU
        return None if kind is None else Activation(kind, Pairing.HALVES)
    activation = None if own is None else _clamped(mlp, own)
    return activation if activation is not None and activation.pairing is Pairing.HALVES else None


def _clamped(module: Any, gate: ClampedGate) -> Activation | None:
    """The activation of experts with this gate, or `None` if its parameters are unsupported."""
    functions = ("NoneType", "SiLU", "SiLUActivation")
    if not gate.alpha and type(getattr(module, "act_fn", None)).__name__ not in functions:
        return None
    limit, alpha = getattr(module, gate.limit, None), getattr(module, gate.alpha, None) if gate.alpha else 1.0
    if not isinstance(limit, int | float) or not isinstance(alpha, int | float):
        return None
    kind = ActivationKind.CLAMPED_SIGMOID if gate.alpha else ActivationKind.SILU
    pairing = Pairing.ALTERNATING if gate.pairing == "alternating" else Pairing.HALVES
    return Activation(kind, pairing, float(limit), float(alpha))


class LayerRecords:
    """The records of one layer's experts, or their parts where each lies by itself, in a mapped file or beside it.

    Args:
        name: the module's in the model.
        pieces: segments of records, uint8 [n, nbytes], together all of them.
        parts: part name -> one view per expert, in place of records.

    Attributes:
        pieces: of parts, the first of the first expert, which the others are found from.
        rows: part name -> one view per expert, made in advance because indexing a tensor takes microseconds.
        stacked: part name -> view [E, *shape], if one piece has all records.
    """

    def __init__(
        self,
        name: str,
        layout: RecordLayout,
        *pieces: torch.Tensor,
        parts: Mapping[str, Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self.name, self.layout, self.is_in_place = name, layout, parts is not None
        views = [layout.views(piece) for piece in pieces]
        self.stacked = views[0] if len(views) == 1 else {}
        self.rows: dict[str, tuple[torch.Tensor, ...]] = {
            part.name: tuple(row for each in views for row in each[part.name].unbind(0)) for part in layout.parts
        }
        if parts is not None:
            self.rows = {part: tuple(experts) for part, experts in parts.items()}
            pieces = (next(iter(self.rows.values()))[0],)
        self.pieces = pieces

    @property
    def records(self) -> torch.Tensor:
        """[E, record bytes], uint8, if one piece has all."""
        return self.pieces[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all records, padding included."""
        if self.is_in_place:
            return sum(len(experts) * experts[0].nbytes for experts in self.rows.values())
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def num_experts(self) -> int:
        return len(next(iter(self.rows.values())))

    @property
    def device(self) -> torch.device:
        """That holds the records and computes the experts."""
        return self.pieces[0].device

    def part(self, name: str, expert: int) -> torch.Tensor:
        """One part of one expert, [out, in] (or [out] for a bias): a view, not a copy."""
        return self.rows[name][expert]

    def forget(self) -> None:
        """Holds no memory from now on.  A model still bound to it raises an error when used."""
        self.stacked.clear()
        self.rows.clear()
        self.pieces = (torch.empty(0, self.layout.nbytes, dtype=torch.uint8),)


def are_even(rows: Sequence[torch.Tensor]) -> bool:
    """Whether they lie at equal distances, as those of a tensor do."""
    places = [row.data_ptr() for row in rows]
    return len({after - before for before, after in pairwise(places)}) <= 1


class ExpertKernel(Protocol):
    """Computes the experts of one layer; created once per layer, bound to its records."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, k], [T, k], all on the records' device -> [T, H] of the type of `hidden_states`."""


Upload = Callable[[torch.Tensor, torch.device], torch.Tensor]
ByGroup = Callable[[torch.Tensor], torch.Tensor]


class GroupedKernel(ExpertKernel, Protocol):
    """Also computes rows that are sorted by expert, where the host knows how many each has.

    The device then has nothing to sort, and the host nothing to wait for.

    Attributes:
        fewest_in_groups: rows from which that is the faster way.
    """

    fewest_in_groups: int

    def for_groups(self, experts: Sequence[int], counts: Sequence[int], upload: Upload) -> ByGroup:
        """Uploads what the device needs to know of such rows.

        Args:
            experts: distinct ids, in the order of their rows; counts: rows of each.
            upload: copies to a device, in order with its work.

        Returns:
            [n, H], sorted so -> [n, H]: what each row's expert makes of it, in the rows' type.
        """


def in_groups(kernel: ExpertKernel, rows: int) -> GroupedKernel | None:
    """The kernel, if it computes so many rows faster in groups."""
    fewest: int | None = getattr(kernel, "fewest_in_groups", None)
    return cast("GroupedKernel", kernel) if fewest is not None and rows >= fewest else None


def rows_at_once(kernel: ExpertKernel) -> int | None:
    """Visits that a kernel prefers per call, if it has a preference."""
    wanted: int | None = getattr(kernel, "rows_at_once", None)
    return wanted


def is_capturable(kernel: ExpertKernel) -> bool:
    """Whether a kernel never synchronises, so that steps with it can be captured in a graph."""
    return bool(getattr(kernel, "is_capturable", False))


def captured_state(kernel: ExpertKernel) -> object:
    """What a captured step relies on besides the kernel: once it is another object, the step is of no use."""
    return getattr(kernel, "captured", None)


@dataclass(frozen=True)
class ExpertMath:
    """The computation of a module's experts, apart from weights.

    Attributes:
        first: name of the first matrix, `gate_up_proj` or `up_proj`; `first_bias`, `down_bias`: names or `None`.
        gate: [.., 2I] -> [.., I] (or [.., I] -> [.., I] without a gate); elementwise along the leading dimensions.
        is_silu_gate: whether `gate` is the usual silu(first half) * second half, which kernels can fuse.
        norm: applied to each expert's output, or `None`.
        activation: the type of `gate`, if native kernels support it.
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
        is_silu = (
            module.has_gate
            and gates_as_usual(module)
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
