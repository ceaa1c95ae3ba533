"""A layer's norm, router, experts, shared expert and residual for a few tokens in one native call.

A dense layer's MLP is computed as a shared expert without others beside it.
"""

from __future__ import annotations

import ctypes
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from engine.experts.card_tokens import CardTokens
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.families import fast_path_of
from engine.families.family import FastPath, Router
from engine.formats.tiles import Pairing
from engine.kernels.interface import Activation, ActivationKind, activation_of_mlp
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.linear import address_of, halves_of, is_plain, is_readable, linear_struct, read_alike
from engine.kernels.native.structs import (
    CardExpertsStruct,
    ExpertsStruct,
    MatrixStruct,
    RouterStruct,
    SparseBlockStruct,
)
from engine.runtime.fast_path.norms import (
    LayerNorms,
    epsilon_of,
    has_experts_beside,
    mlp_of,
    multiple_of,
    offset_of,
)

_SHARED = ("shared_experts", "shared_expert", "shared_mlp")
_SCORING = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
"""As switchyard_kernels.h numbers them."""
_SQRT_SOFTPLUS = "SqrtSoftplusActivation"
"""What the library calls it."""
STEP_IDS = torch.zeros(MAX_TOKENS, dtype=torch.int64)
"""The tokens of a step, for routers that look their experts up."""


class SparseBlock:
    """The sparse block of one decoder layer, or its dense MLP.

    Attributes:
        address: of what describes it to the kernels, which stamp its steps with it.
        routing: where a step's chosen experts and their shares go.
        tokens: of the card that has experts of the block; only while one is under way, steps may be computed.
    """

    def __init__(
        self, struct: SparseBlockStruct, kernels: NativeKernels, experts: Any = None, held: tuple[Any, ...] = ()
    ) -> None:
        self.struct, self._experts, self._held = struct, experts, held
        self._bound = getattr(experts, BANK_LAYER, None)
        kernel = self._bound[1] if self._bound is not None else None
        self.tokens: CardTokens | None = kernel.tokens if isinstance(kernel, HybridExperts) else None
        self.address = ctypes.addressof(struct)
        self._kernels = kernels
        self._chosen = torch.zeros(MAX_TOKENS, struct.router.top_k, dtype=torch.int64)
        self._shares = torch.zeros(MAX_TOKENS, struct.router.top_k)
        self.routing = (self._chosen.data_ptr(), self._shares.data_ptr())

    @classmethod
    def of(cls, layer: Any, kernels: NativeKernels) -> SparseBlock | None:
        """That of `layer`, of a known kind; `None` if its MLP is of none, or its experts are not computed natively."""
        (block, beside), norms = mlp_of(layer), LayerNorms.of(layer)
        if block is None and beside is None:
            return cls(SparseBlockStruct(), kernels)  # the layer is attention alone
        apart = _NormsBeside.of(layer) if has_experts_beside(layer) else None
        if apart is not None:
            block, beside = layer, block
        path = fast_path_of(block, "block")
        if path is None:
            dense = beside if block is None else block
            return cls._of_dense(layer, dense, norms, kernels) if block is None or beside is None else None
        router = block.router if hasattr(block, "router") else block.gate
        bound = getattr(block.experts, BANK_LAYER, None)
        shared = beside if beside is not None else shared_expert_of(block)
        is_wide = norms.before_mlp.weight.dtype == torch.float32
        if (
            not (
                _are_plain(norms)
                and (apart is None or apart.are_plain)
                and _is_readable_weight(attrgetter(path.router.weight)(router))
            )
            or not (shared is None or _is_plain_mlp(shared, path))
            or bound is None
            or not isinstance(getattr(block, "fc1_latent_proj", None), torch.nn.Identity | None)
            or (experts := _experts(bound[1])) is None
            or (is_wide and experts[1] is not None)
            or (path.router.scoring == "sqrtsoftplus" and type(router.score_fn).__name__ != _SQRT_SOFTPLUS)
        ):
            return None
        of_experts, card = experts
        gate = getattr(block, "shared_expert_gate", None)
        if gate is not None and not is_plain(gate.weight):
            return None
        correction = _correction(router, block, path.router)
        table = getattr(router, path.router.table, None) if path.router.table else None
        table = None if table is None else table.to(torch.int32).contiguous()
        struct = SparseBlockStruct(
            None if is_wide else norms.before_mlp.weight.data_ptr(),
            _router(router, block, path.router, correction, apart),
            of_experts,
            *(_matrices(shared, path) if shared is not None else (MatrixStruct(),) * 3),
            gate.weight.data_ptr() if gate is not None else None,
            ctypes.addressof(card) if card is not None else None,
            *_rest(norms, shared, path),
            *_multiples(layer),
            *(apart.addresses if apart is not None else ()),
        )
        if is_wide:
            struct.wide_norm = norms.before_mlp.weight.data_ptr()
        if table is not None:
            struct.router.table, struct.router.ids = table.data_ptr(), STEP_IDS.data_ptr()
        return cls(struct, kernels, block.experts, (correction, apart, table))

    @classmethod
    def _of_dense(cls, layer: Any, mlp: Any, norms: LayerNorms, kernels: NativeKernels) -> SparseBlock | None:
        weight, path = norms.before_mlp.weight, fast_path_of(layer, "layer")
        assert path is not None
        if not (_are_plain(norms) and _is_plain_mlp(mlp, path)):
            return None
        struct = SparseBlockStruct(
            weight.data_ptr(),
            RouterStruct(),
            ExpertsStruct(hidden=weight.numel()),
            *_matrices(mlp, path),
            None,
            None,
            *_rest(norms, mlp, path),
            *_multiples(layer),
        )
        return cls(struct, kernels)

    @property
    def is_there(self) -> bool:
        """Whether the layer has one at all."""
        return bool(self.struct.norm or self.struct.wide_norm)

    @property
    def has_experts(self) -> bool:
        """Whether it has any: a dense MLP has none."""
        return bool(self.struct.experts.count)

    @property
    def can_step(self) -> bool:
        """Whether a step may be computed now: a card's in a token under way, and if nobody has replaced its experts."""
        return self.tokens is None or (self.tokens.is_open and getattr(self._experts, BANK_LAYER, None) is self._bound)

    def step(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 [1, q, hidden], contiguous, q up to `MAX_TOKENS`, with the block's result added.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        assert hidden_states.dtype == torch.float32
        if not self.is_there:
            return hidden_states
        out = torch.empty_like(hidden_states)
        kernels = self._kernels
        tokens, start = hidden_states.shape[1], hidden_states.data_ptr()
        if kernels.sparse_step(kernels.pool, self.address, tokens, start, *self.routing, out.data_ptr()):
            raise out_of_memory()
        return out


def shared_expert_of(block: Any) -> Any:
    """The expert that every token goes to, besides those that a block's router chooses; `None` if it has none."""
    return next((getattr(block, name) for name in _SHARED if getattr(block, name, None) is not None), None)


def _are_plain(norms: LayerNorms) -> bool:
    before, after = norms.before_mlp, norms.after_mlp
    if not is_plain(before.weight):
        return norms.has_streams and _is_readable_weight(before.weight)
    return after is None or (is_plain(after.weight) and epsilon_of(after) == epsilon_of(before))


class _NormsBeside(NamedTuple):
    """Of experts beside an MLP: theirs and the router's, and what their shares are multiplied by."""

    before: Any
    after: Any
    after_mlp: Any
    of_router: torch.Tensor
    multiples: torch.Tensor

    @classmethod
    def of(cls, layer: Any) -> _NormsBeside:
        router = layer.router
        norms = (
            layer.pre_feedforward_layernorm_2,
            layer.post_feedforward_layernorm_2,
            layer.post_feedforward_layernorm_1,
        )
        scales = router.scale.detach().float() * router.scalar_root_size, router.per_expert_scale.detach().float()
        return cls(*norms, *(scale.contiguous() for scale in scales))

    @property
    def are_plain(self) -> bool:
        return all(is_plain(norm.weight) for norm in self[:3])

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(norm.weight.data_ptr() for norm in self[:3])


def _multiples(layer: Any) -> tuple[float, float]:
    """Of what a layer's MLP adds, and of what the layer gives."""
    return multiple_of(layer), float(getattr(layer, "layer_scalar", 0.0))


def _rest(norms: LayerNorms, shared: Any, path: FastPath) -> tuple[Any, ...]:
    """Of a struct: what the norms are, and the shared expert's or the dense MLP's activation."""
    usual = Activation(ActivationKind.SILU, Pairing.HALVES)
    activation = usual if shared is None else activation_of_mlp(shared, path.mlp_activation)
    assert activation is not None
    return (
        address_of(norms.after_mlp.weight) if norms.after_mlp is not None else None,
        epsilon_of(norms.before_mlp),
        offset_of(norms.before_mlp),
        activation.kind,
        activation.limit,
        activation.alpha,
    )


def _experts(kernel: Any) -> tuple[ExpertsStruct, CardExpertsStruct | None] | None:
    """The experts that a kernel computes natively, all in RAM or some of them on a card."""
    if isinstance(kernel, NativeExperts):
        return kernel.struct, None
    if isinstance(kernel, HybridExperts) and kernel.tokens is not None:
        return kernel.tokens.experts_of(kernel)
    return None


def _mlp_parts(mlp: Any, path: FastPath) -> list[Any]:
    names = ("gate_up_proj", "down_proj") if hasattr(mlp, "gate_up_proj") else path.mlp_parts
    return [getattr(mlp, name, None) for name in names if name]


def _matrices(mlp: Any, path: FastPath) -> list[MatrixStruct | None]:
    *first, down = map(linear_struct, _mlp_parts(mlp, path))
    if "" in path.mlp_parts:
        first = [MatrixStruct(), *first]
    elif len(first) == 1:
        halves = halves_of(first[0]) if first[0] is not None else None
        first = list(halves or (None, None))
    return [*first, down]


def _is_plain_mlp(mlp: Any, path: FastPath) -> bool:
    parts = _mlp_parts(mlp, path)
    if None in parts:
        return False
    structs = _matrices(mlp, path)
    return (
        activation_of_mlp(mlp, path.mlp_activation) is not None
        and None not in structs
        and all(part.bias is None and is_readable(part) for part in parts)
        and read_alike(each for each in structs[:2] if each is None or each.rows)  # the same vector
    )


def _correction(router: Any, block: Any, how: Router) -> torch.Tensor | None:
    """What is added to scores for the choice, in float32; LFM2-MoE may have it or not."""
    name = how.correction.partition(".")[0]
    holder = next((each for each in (router, block) if name and hasattr(each, name)), None)
    if holder is None:
        return None
    correction: torch.Tensor = attrgetter(how.correction)(holder)
    return correction.detach().float().contiguous()


def _router(
    router: Any, block: Any, how: Router, correction: torch.Tensor | None, apart: _NormsBeside | None
) -> RouterStruct:
    groups = (1, 1)
    if how.groups is not None and (how.groups_if is None or getattr(router, how.groups_if[0]) == how.groups_if[1]):
        groups = (getattr(router, how.groups[0]), getattr(router, how.groups[1]))
    normalise = getattr(router, how.normalise) if isinstance(how.normalise, str) else how.normalise
    weight = attrgetter(how.weight)(router)
    return RouterStruct(
        weight.data_ptr(),
        address_of(getattr(router, how.bias)) if how.bias else None,
        address_of(correction),
        router.top_k if hasattr(router, "top_k") else router.config.top_k_experts,
        _SCORING[how.scoring],
        *groups,
        how.bf16_logits,
        bool(normalise),
        how.bf16_shares,
        getattr(router if hasattr(router, how.scale) else block, how.scale) if how.scale else 1.0,
        weight.dtype == torch.float32,
        getattr(router, how.least) if how.least else 0.0,
        *((apart.of_router.data_ptr(), apart.multiples.data_ptr()) if apart is not None else ()),
    )


def _is_readable_weight(weight: torch.Tensor) -> bool:
    exact = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
    return exact or is_plain(weight)
