"""A layer's norm, router, experts, shared expert and residual for one token in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from engine.experts.dispatch import BANK_LAYER
from engine.kernels.native.experts import NativeExperts
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import linear_struct
from engine.kernels.native.structs import MatrixStruct, RouterStruct, SparseBlockStruct
from engine.runtime.short_way.weights import address_of, is_plain, is_readable, out_of_memory

_SOFTMAX, _SIGMOID = 0, 1


class SparseBlock:
    """The sparse block of one decoder layer.

    Attributes:
        chosen: whom the last step chose: int64 [k].
    """

    def __init__(self, struct: SparseBlockStruct, kernels: NativeKernels) -> None:
        self.struct = struct
        self._address = ctypes.addressof(struct)
        self._kernels = kernels
        self._chosen = torch.zeros(struct.router.top_k, dtype=torch.int64)
        self._shares = torch.zeros(struct.router.top_k)
        self.chosen: Callable[[], bytes] = self._chosen.numpy().tobytes
        self._routing = (self._chosen.data_ptr(), self._shares.data_ptr())

    @classmethod
    def of(cls, layer: Any, kernels: NativeKernels) -> SparseBlock | None:
        """That of `layer`, or `None` if it is dense, of no known kind, or its experts are not computed natively."""
        block, norm = layer.mlp, layer.post_attention_layernorm
        route = _ROUTERS.get(type(block))
        if route is None:
            return None
        router = block.router if hasattr(block, "router") else block.gate
        correction = getattr(router, "e_score_correction_bias", None)
        bound = getattr(block.experts, BANK_LAYER, None)
        shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
        if (
            not (is_plain(norm.weight) and is_plain(router.weight))
            or not (correction is None or correction.dtype == torch.float32)
            or not (shared is None or _is_plain_mlp(shared))
            or bound is None
            or not isinstance(bound[1], NativeExperts)
        ):
            return None
        gate = getattr(block, "shared_expert_gate", None)
        if gate is not None and not is_plain(gate.weight):
            return None
        parts = (shared.gate_proj, shared.up_proj, shared.down_proj) if shared is not None else ()
        struct = SparseBlockStruct(
            norm.weight.data_ptr(),
            route(router),
            bound[1].struct,
            *((linear_struct(part) for part in parts) if parts else (MatrixStruct(),) * 3),
            gate.weight.data_ptr() if gate is not None else None,
            norm.variance_epsilon,
            type(block) is gpt_oss.GptOssMLP,
        )
        return cls(struct, kernels)

    def step(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [1, 1, hidden], contiguous, with the block's result added.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        out = torch.empty_like(hidden_states)
        kernels = self._kernels
        if kernels.sparse_step(kernels.pool, self._address, hidden_states.data_ptr(), *self._routing, out.data_ptr()):
            raise out_of_memory()
        return out


def _is_plain_mlp(mlp: Any) -> bool:
    parts = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    structs = [linear_struct(part) for part in parts]
    return (
        mlp.config.hidden_act == "silu"
        and all(part.bias is None and is_readable(part) for part in parts)
        and len({struct.precision for struct in structs[:2] if struct is not None}) == 1  # they read the same vector
    )


def _mixtral(router: Any) -> RouterStruct:
    return _router(router, normalise=True, bf16_shares=False)


def _qwen(router: Any) -> RouterStruct:
    return _router(router, normalise=bool(router.norm_topk_prob), bf16_shares=True)


def _gpt_oss(router: Any) -> RouterStruct:
    # A softmax over the chosen logits is one over all of them, made to sum to 1.
    return _router(router, bias=router.bias, normalise=True, bf16_shares=True)


def _deepseek_v2(router: Any) -> RouterStruct:
    grouped = router.topk_method == "group_limited_greedy"
    return _router(
        router,
        groups=(router.num_group, router.topk_group) if grouped else (1, 1),
        bf16_logits=False,
        scale=router.routed_scaling_factor,
    )


def _deepseek_v3(router: Any) -> RouterStruct:
    return _router(
        router,
        correction=router.e_score_correction_bias,
        scoring=_SIGMOID,
        groups=(router.num_group, router.topk_group),
        bf16_logits=False,
        normalise=bool(router.norm_topk_prob),
        scale=router.routed_scaling_factor,
    )


_ROUTERS: dict[type, Callable[[Any], RouterStruct]] = {
    mixtral.MixtralSparseMoeBlock: _mixtral,
    olmoe.OlmoeSparseMoeBlock: _qwen,
    qwen2_moe.Qwen2MoeSparseMoeBlock: _qwen,
    qwen3_moe.Qwen3MoeSparseMoeBlock: _qwen,
    gpt_oss.GptOssMLP: _gpt_oss,
    deepseek_v2.DeepseekV2Moe: _deepseek_v2,
    deepseek_v3.DeepseekV3MoE: _deepseek_v3,
}


def _router(
    router: Any,
    *,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    scoring: int = _SOFTMAX,
    groups: tuple[int, int] = (1, 1),
    bf16_logits: bool = True,
    normalise: bool = False,
    bf16_shares: bool = False,
    scale: float = 1.0,
) -> RouterStruct:
    return RouterStruct(
        router.weight.data_ptr(),
        address_of(bias),
        address_of(correction),
        router.top_k,
        scoring,
        *groups,
        bf16_logits,
        normalise,
        bf16_shares,
        scale,
    )
