"""A gated delta net (Yang et al. 2024, "Gated Delta Networks") of a few tokens in one native call."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from engine.families import fast_path_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import is_plain, is_readable, linear_struct, out_of_memory, read_alike
from engine.kernels.native.paged_attention import KvType
from engine.kernels.native.structs import DeltaStruct, MatrixStruct
from engine.runtime.fast_path.angles import Angles
from engine.runtime.fast_path.native_attention import Claim
from engine.runtime.fast_path.norms import LayerNorms, epsilon_of, offset_of
from engine.runtime.kv.layers import StateLayer

_APART = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
_TOGETHER = (("in_proj_qkvz",), ("in_proj_ba",))
"""The projections of a module: those to queries, keys, values and z, and those to b and a, in the kernel's order."""


class DeltaNet:
    """The linear attention of one decoder layer.  It rotates nothing.

    Attributes: as of `GroupedAttention`.
    """

    type = ""
    rotated = 0

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        net, norm = layer.linear_attn, LayerNorms.of(layer).before_attention
        wide, narrow = _projections(net)
        _compute_in_floats(net)
        self._held = (net.A_log.detach().float().exp().neg().contiguous(), net.dt_bias.detach().float().contiguous())
        self._struct = DeltaStruct(
            norm.weight.data_ptr(),
            net.conv1d.weight.data_ptr(),
            *(tensor.data_ptr() for tensor in self._held),
            net.norm.weight.data_ptr(),
            *(struct for group in (wide, narrow) for struct in [*map(linear_struct, group), MatrixStruct()][:2]),
            linear_struct(net.out_proj),
            epsilon_of(norm),
            epsilon_of(net.norm),
            offset_of(norm),
            net.hidden_size,
            net.num_k_heads,
            net.num_v_heads,
            net.head_k_dim,
            net.head_v_dim,
            net.conv_kernel_size,
        )
        self.address = ctypes.addressof(self._struct)
        self.kernels = kernels
        self._index: int = net.layer_idx

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether this decoder layer has a net of the kind that this computes."""
        net: Any = getattr(layer, "linear_attn", None)
        if fast_path_of(net, "delta") is None:
            return False
        groups = _projections(net)
        linears = [linear for group in (*groups, (net.out_proj,)) for linear in group]
        return (
            all(linear.bias is None and is_readable(linear) for linear in linears)
            and all(read_alike(linear_struct(each) for each in group) for group in groups)
            and all(map(is_plain, (net.conv1d.weight, net.norm.weight, LayerNorms.of(layer).before_attention.weight)))
            and net.conv1d.bias is None
            and net.activation == "silu"
        )

    def step(self, hidden_states: torch.Tensor, cache: Any, positions: Any) -> torch.Tensor | None:  # noqa: ARG002
        """float32 [1, q, hidden], contiguous, with the net's result added; `None` if this is not for it.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        tokens = hidden_states.shape[1]
        if not self.can_claim(tokens, cache):
            return None
        recent, states = self._states(cache)
        assert hidden_states.dtype == torch.float32
        out = torch.empty_like(hidden_states)
        kernels, start = self.kernels, hidden_states.data_ptr()
        places = recent.data_ptr(), states.data_ptr(), out.data_ptr()
        if kernels.delta_step(kernels.pool, self.address, tokens, start, *places):
            raise out_of_memory()
        return out

    def angles_of(self, positions: Any, tokens: int) -> Angles | None:  # noqa: ARG002 - it has none
        """`None`: a model whose layers are all of this kind has no angles."""
        return None

    def can_claim(self, tokens: int, cache: Any) -> bool:  # noqa: ARG002 - any number
        """Whether the cache holds states of one sequence, which a step brings up to date."""
        held = cache.layers[self._index]
        if type(held) is not StateLayer or held.record_past or not held.has_previous_state[0]:
            return False
        recent, states = held.conv_states[0], held.recurrent_states[0]
        return (
            held.is_recurrent_states_initialized[0]
            and recent.shape[0] == 1
            and recent.shape[-1] == self._struct.kernel
            and all((of.dtype, of.device.type) == (torch.float32, "cpu") for of in (recent, states))
            and recent.is_contiguous()
            and states.is_contiguous()
        )

    def claim(self, tokens: int, cache: Any) -> Claim | None:
        """As `GroupedAttention.claim`: what convolutions read last takes the place of keys, states that of values."""
        if not self.can_claim(tokens, cache):
            return None
        recent, states = self._states(cache)
        return (recent.data_ptr(), states.data_ptr(), None, None, 0, int(KvType.BF16)), 0

    def _states(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        held = cache.layers[self._index]
        return held.conv_states[0], held.recurrent_states[0]


def _compute_in_floats(net: Any) -> None:
    """Lets the library, which computes prompts, round only what it multiplies with matrices, too: a state keeps what it
    has taken in."""
    net.conv1d.weight = torch.nn.Parameter(net.conv1d.weight.detach().float(), requires_grad=False)
    for projection in (each for group in _projections(net) for each in group):
        projection.register_forward_hook(lambda _module, _inputs, out: out.float())
    net.norm.register_forward_hook(lambda norm, _inputs, out: out.to(norm.weight.dtype))


def _projections(net: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    kind = _APART if hasattr(net, "in_proj_qkv") else _TOGETHER
    wide, narrow = (tuple(getattr(net, name) for name in names) for names in kind)
    return wide, narrow
