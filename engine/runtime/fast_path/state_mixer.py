"""What some layers have in place of attention, of a few tokens of some sequences in one native call: a gated delta net
(Yang et al. 2024, "Gated Delta Networks"), Mamba 2 (Dao and Gu 2024, "Transformers are SSMs") or a short convolution.

Of a prompt, projections are the library's linear layers, as those of attention are; all between them is another call.
Kimi Delta Attention (Kimi Team 2025, "Kimi Linear", section 3) is a delta net whose states decay key by key.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from engine.families import fast_path_of
from engine.families.library import own_forward, take_over
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.linear import (
    MixedRows,
    TurnedLinear,
    address_of,
    is_plain,
    is_readable,
    linear_struct,
    reads_together,
)
from engine.kernels.native.paged_attention import Piece, Pieces, StatePages
from engine.kernels.native.structs import DeltaStruct, MatrixStruct, PagesStruct
from engine.runtime.fast_path.angles import Angles
from engine.runtime.fast_path.norms import LayerNorms, epsilon_of, multiple_of, offset_of
from engine.runtime.kv.layers import StateLayer

_MOST_TAPS = 8
"""Of a convolution, for the kernel."""
_DELTA_RULE, _STATE_SPACE, _CONVOLUTION = range(3)
"""As switchyard_kernels.h numbers them."""
_CHANNELS = 64
"""Of a convolution, for one thread at a time."""
_NO_PAGES = torch.empty(0, dtype=torch.int32)


class _Parts(NamedTuple):
    """What a net consists of, by the kernel's names; what it has not is `None`."""

    mixed: Any
    k: Any
    v: Any
    z: Any
    b: Any
    a: Any
    o: Any
    z_first: Any
    a_first: Any
    norm: Any
    rates: Any
    convolution: Any
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    decays_keys: bool = False
    rule: int = _DELTA_RULE

    @property
    def inputs(self) -> tuple[Any, ...]:
        """All matrices but the output's."""
        return (*self[:6], self.z_first, self.a_first)

    @property
    def given(self) -> tuple[Any, ...]:
        """What the kernel for prompts is given the results of."""
        return self[:6]

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's; (0,) if nothing is kept but what the convolution read last."""
        if self.rule == _CONVOLUTION:
            return (0,)
        own = (self.value_dim, self.key_dim) if self.rule == _STATE_SPACE else (self.key_dim, self.value_dim)
        return self.value_heads, *own

    @classmethod
    def of(cls, net: Any) -> _Parts:
        if hasattr(net, "forget_gate"):
            gate, dim = net.forget_gate, net.head_dim
            return cls(
                *(net.q_proj, net.k_proj, net.v_proj, net.g_b_proj, net.b_proj, gate.f_b_proj, net.o_proj),
                *(net.g_a_proj, gate.f_a_proj, net.o_norm, gate, net.conv1d),
                *(net.num_heads, net.num_heads, dim, dim, True),
            )
        if hasattr(net, "in_proj"):
            matrices = net.in_proj, *(None,) * 5, net.out_proj, None, None
            if not hasattr(net, "A_log"):
                width = net.out_proj.in_features
                heads = width // _CHANNELS if width % _CHANNELS == 0 else 1
                return cls(*matrices, None, None, net.conv, heads, heads, 0, width // heads, rule=_CONVOLUTION)
            heads = net.n_groups, net.num_heads, net.ssm_state_size, net.head_dim
            return cls(*matrices, net.norm, net, net.conv1d, *heads, rule=_STATE_SPACE)
        if hasattr(net, "in_proj_qkv"):
            inputs = net.in_proj_qkv, None, None, net.in_proj_z, net.in_proj_b, net.in_proj_a
        else:
            mixed = own_forward(net.in_proj_qkvz)
            first, z = mixed.parts if isinstance(mixed, MixedRows) else (net.in_proj_qkvz, None)
            inputs = first, None, None, z, net.in_proj_ba, None
        heads = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
        return cls(*inputs, net.out_proj, None, None, net.norm, net, net.conv1d, *heads)


def _net_of(layer: Any) -> Any:
    """The net of a decoder layer, of any kind; `None` if it has none."""
    names = ("linear_attn", "mamba", "conv", "mixer", "self_attn")
    return next((net for name in names if (net := getattr(layer, name, None)) is not None), None)


def _struct_of(linear: Any) -> MatrixStruct | None:
    return MatrixStruct() if linear is None else linear_struct(linear)


def _floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _turned(parts: _Parts) -> TurnedLinear | None:
    """The output's matrix, if it is stored with its columns in another order."""
    forward = own_forward(parts.o)
    return forward if isinstance(forward, TurnedLinear) else None


def _heads_of(turned: TurnedLinear, parts: _Parts) -> torch.Tensor | None:
    """int32: the place of each value head among the columns of the output's matrix; `None` if heads are not in one
    piece."""
    heads, width = parts.value_heads, parts.value_dim
    order = turned.order.view(heads, width)
    firsts = order[:, :1]
    if not torch.equal(order, firsts + torch.arange(width)) or bool((firsts % width).any()):
        return None
    return (firsts[:, 0] // width).to(torch.int32)


class StateMixer:
    """The one of a decoder layer.  It rotates nothing.

    Attributes: as of `GroupedAttention`.
    """

    type = ""
    rotated = 0

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        net, norm = _net_of(layer), LayerNorms.of(layer).before_attention
        self._net, self._norm, self._parts = net, norm, _Parts.of(net)
        parts = self._parts
        _compute_in_floats(parts, norm.weight.dtype)
        rates = parts.rates
        self._held = (
            parts.convolution.weight.detach().squeeze(1).t().contiguous(),
            None if rates is None else _floats(rates.A_log.detach().float().exp().neg()),
            None if rates is None else _floats(rates.dt_bias),
        )
        self._more_held = _floats(parts.convolution.bias), _floats(getattr(rates, "D", None))
        turned = _turned(parts)
        self._output: Callable[[torch.Tensor], torch.Tensor] = parts.o if turned is None else turned.stored
        self._o_heads = None if turned is None else _heads_of(turned, parts)
        self._struct = DeltaStruct(
            norm.weight.data_ptr(),
            *map(address_of, self._held),
            address_of(parts.norm.weight) if parts.norm is not None else None,
            *map(_struct_of, parts.given),
            linear_struct(parts.o) if turned is None else turned.stored.struct,
            address_of(self._o_heads),
            *(
                linear_struct(linear) if linear is not None else MatrixStruct()
                for linear in (parts.z_first, parts.a_first)
            ),
            epsilon_of(norm),
            epsilon_of(parts.norm) if parts.norm is not None else 0.0,
            offset_of(norm),
            norm.weight.numel(),
            *(parts.key_heads, parts.value_heads, parts.key_dim, parts.value_dim),
            net.conv_kernel_size,
            parts.decays_keys,
            getattr(parts.norm, "activation", "silu") == "sigmoid",
            parts.rule,
            multiple_of(layer),
            *map(address_of, self._more_held),
        )
        self.in_library = net.forward
        take_over([(net, self._forward)])
        self.address = ctypes.addressof(self._struct)
        self.kernels = kernels
        self._index: int = net.layer_idx

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether this decoder layer has a net of the kind that this computes."""
        net = _net_of(layer)
        if fast_path_of(net, "delta") is None:
            return False
        parts = _Parts.of(net)
        turned = _turned(parts)
        mixed, k, v, z, b, a, z_first, a_first = (
            None if linear is None else linear_struct(linear) for linear in parts.inputs
        )
        return (
            all(linear.bias is None and is_readable(linear) for linear in parts.inputs if linear is not None)
            and parts.o.bias is None
            and (is_readable(parts.o) if turned is None else _heads_of(turned, parts) is not None)
            and reads_together((mixed, k, v, z_first or z))
            and reads_together((b, a_first or a))
            and is_plain(parts.convolution.weight)
            and is_plain(LayerNorms.of(layer).before_attention.weight)
            and (parts.norm is None or is_plain(parts.norm.weight))
            and (parts.rule == _CONVOLUTION or net.activation == "silu")
            and (parts.rule != _STATE_SPACE or _is_usual_space(net))
            and getattr(parts.norm, "activation", "silu") in ("silu", "swish", "sigmoid")
            and net.conv_kernel_size <= _MOST_TAPS
        )

    def rows(self, hidden_states: torch.Tensor, held: PagesStruct, pieces: Pieces, positions: Any) -> torch.Tensor:  # noqa: ARG002
        """float32 [1, q, hidden], contiguous, of the next tokens of several sequences, with the net's result added;
        states are pages.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        assert hidden_states.dtype == torch.float32
        out, kernels = torch.empty_like(hidden_states), self.kernels
        where = ctypes.addressof(held), pieces.address_for(held), len(pieces.pieces)
        if kernels.delta_step(kernels.pool, self.address, *where, hidden_states.data_ptr(), out.data_ptr()):
            raise out_of_memory()
        return out

    def read(self, hidden_states: torch.Tensor, held: PagesStruct, pieces: Pieces) -> torch.Tensor:
        """The same of any number of tokens, projections by the net's own layers."""
        added = self._output(self._answer(self._norm(hidden_states), held, pieces))
        return torch.add(hidden_states, added, alpha=self._struct.multiple)

    @property
    def page_bytes(self) -> int:
        """Of a sequence's state."""
        recent: int = self._parts.channels * self._struct.kernel
        return 4 * (recent + math.prod(self._parts.state))

    def pages(self, count: int) -> StatePages:
        """Room for so many sequences' states."""
        return StatePages(self._parts.channels, self._struct.kernel, self._parts.state, count)

    def angles_of(self, positions: Any, tokens: int) -> Angles | None:  # noqa: ARG002 - it has none
        """None at all."""
        return Angles.none()

    def _can_go_on(self, cache: Any) -> bool:
        """Whether the cache holds states of one sequence, which a step brings up to date."""
        held = cache.layers[self._index]
        if not isinstance(held, StateLayer) or held.record_past or not held.has_previous_state[0]:
            return False
        has_state = self._parts.rule != _CONVOLUTION
        if has_state and not held.is_recurrent_states_initialized[0]:
            return False
        recent = held.conv_states[0]
        return (
            recent.shape[0] == 1
            and recent.shape[-1] == self._struct.kernel
            and all(
                (of.dtype, of.device.type) == (torch.float32, "cpu") and of.is_contiguous()
                for of in ((recent, held.recurrent_states[0]) if has_state else (recent,))
            )
        )

    def _states(self, cache: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        held = cache.layers[self._index]
        return held.conv_states[0], held.recurrent_states[0]

    def _forward(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **options: Any
    ) -> torch.Tensor:
        """The net's `forward`."""
        is_one = hidden_states.shape[0] == 1 and attention_mask is None and options.get("cu_seq_lens_q") is None
        answer: torch.Tensor
        if is_one and cache is not None and self._begin(cache):
            held = PagesStruct(*map(address_of, self._states(cache)))
            pieces = Pieces([Piece(_NO_PAGES, 0, hidden_states.shape[1])])
            answer = self._output(self._answer(hidden_states, held, pieces))
        else:
            answer = self.in_library(hidden_states, cache=cache, attention_mask=attention_mask, **options)
        return answer

    def _answer(self, hidden_states: torch.Tensor, held: PagesStruct, pieces: Pieces) -> torch.Tensor:
        """[1, T, hidden], normalised, of any number of tokens -> what the output's matrix takes."""
        parts, kernels = self._parts, self.kernels
        before = {"z": parts.z_first, "a": parts.a_first}
        given = []
        for name, linear in zip(parts._fields, parts.given, strict=False):
            first = before.get(name)
            inputs = hidden_states if first is None else first(hidden_states)
            given.append(None if linear is None else linear(inputs)[0].float().contiguous())
        out = torch.empty(hidden_states.shape[1], parts.o.in_features)
        for piece in pieces.struct:
            own = (None if each is None else each[piece.first].data_ptr() for each in given)
            places = (ctypes.c_void_p * len(given))(*own)
            where = kernels.pool, self.address, ctypes.addressof(held), ctypes.addressof(piece)
            if kernels.delta_rows(*where, ctypes.addressof(places), out[piece.first].data_ptr()):
                raise out_of_memory()
        return out[None].to(self._norm.weight.dtype)

    def _begin(self, cache: Any) -> bool:
        """Whether a cache holds states that a prompt can bring up to date, of nothing if it is the first one."""
        held, parts = cache.layers[self._index], self._parts
        if isinstance(held, StateLayer) and not held.record_past and not held.is_conv_states_initialized[0]:
            kernel = self._struct.kernel
            held.lazy_initialization(torch.zeros(1, parts.channels, kernel), conv_kernel_size=kernel)
            if parts.rule != _CONVOLUTION:
                held.lazy_initialization(recurrent_states=torch.zeros(1, *parts.state))
            held.has_previous_state[0] = True
        return self._can_go_on(cache)


def _compute_in_floats(parts: _Parts, dtype: torch.dtype) -> None:
    """Lets the library, which computes several sequences together, round only what it multiplies with matrices, too: a
    state keeps what it has taken in."""
    for name, parameter in list(parts.convolution.named_parameters()):
        setattr(parts.convolution, name, torch.nn.Parameter(parameter.detach().float(), requires_grad=False))
    for projection in parts.given:
        if projection is not None:
            projection.register_forward_hook(lambda _module, _inputs, out: out.float())
    if parts.norm is not None:
        parts.norm.register_forward_hook(lambda norm, _inputs, out: out.to(norm.weight.dtype))
    else:
        parts.o.register_forward_pre_hook(lambda _module, inputs: (inputs[0].to(dtype),))


def _is_usual_space(net: Any) -> bool:
    """Whether steps of any length are taken, and norms are of a key head's values.

    Nemotron-H's are to be of 0.001 at least: the library sees to that in prompts alone, the model's makers do not.
    """
    least, most = getattr(net, "time_step_limit", (0.0, math.inf))
    return least <= 0.001 and most == math.inf and net.norm.group_size * net.n_groups == net.num_heads * net.head_dim
