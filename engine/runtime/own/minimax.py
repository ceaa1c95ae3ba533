"""MiniMax-Text-01 and M1 (MiniMax 2025): most layers sum up what they have read (lightning attention).

The library has the family, too, but rotates whole heads, where its makers' code, llama.cpp and vLLM rotate
`rotary_dim` dimensions of each (64 of 128), and reads several tokens on top of a context in one step each.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.minimax import configuration_minimax, modeling_minimax
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Attention, MiniMaxM2RotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextModel

from engine.families import PACKAGES
from engine.runtime.own.parts import OwnForCausalLM, OwnLayers

_FACTORS = {
    f"layernorm_{whose}_{which}": f"{ours}_{which}_factor"
    for whose, ours in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for which in ("alpha", "beta")
}
"""What the makers' checkpoints call what the library's call otherwise."""


@strict
class MiniMaxConfig(configuration_minimax.MiniMaxConfig):  # type: ignore[misc]  # the library is untyped
    """The library's, and what its makers' checkpoints have instead."""

    attribute_map: ClassVar[dict[str, str]] = {**configuration_minimax.MiniMaxConfig.attribute_map, **_FACTORS}

    head_dim: int | None = None
    layer_types: list[str] | None = None
    rotary_dim: int | None = None
    attn_type_list: list[int] | None = None
    postnorm: bool = True
    shared_intermediate_size: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.layer_types is None and self.attn_type_list is not None:
            self.layer_types = ["full_attention" if each else "linear_attention" for each in self.attn_type_list]
        super().__post_init__(**kwargs)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Says in the library's words how much of a head is rotated."""
        if self.rotary_dim is not None and self.head_dim:
            kwargs.setdefault("partial_rotary_factor", self.rotary_dim / self.head_dim)
        found: dict[str, Any] = super().convert_rope_params_to_dict(**kwargs)
        return found

    def validate_architecture(self) -> None:
        if not self.postnorm or self.shared_intermediate_size or self.sliding_window:
            raise ValueError("it has shared experts, a sliding window, or norms before what is added to")


class MiniMaxAttention(MiniMaxM2Attention):  # type: ignore[misc]  # the library is untyped
    """MiniMax-M2's without norms."""

    def __init__(self, config: MiniMaxConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = torch.nn.Identity(), torch.nn.Identity()


class MiniMaxLightningAttention(torch.nn.Module):
    """A sum of what was read for each head, which decays: block by block, from where it was left."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.head_dim = layer_idx, config.num_attention_heads, config.head_dim
        self.block_size = config.block_size
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        self.qkv_proj = torch.nn.Linear(hidden, 3 * width, bias=False)
        self.output_gate = torch.nn.Linear(hidden, width, bias=False)
        self.out_proj = torch.nn.Linear(width, hidden, bias=False)
        self.norm = modeling_minimax.MiniMaxRMSNorm(width)
        # As the library's.
        self.decay_of_layer = 1 - layer_idx / (config.num_hidden_layers - 1 + 1e-5) + 1e-5

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        batch, tokens, _hidden = hidden_states.shape
        mixed = modeling_minimax.apply_mask_to_padding_states(silu(self.qkv_proj(hidden_states)), attention_mask)
        parts = mixed.view(batch, tokens, self.heads, 3 * self.head_dim).transpose(1, 2).split(self.head_dim, -1)
        states = cache.layers[self.layer_idx] if cache is not None else None
        held = states.recurrent_states[0] if states is not None else None
        if held is None:
            held = hidden_states.new_zeros(batch, self.heads, self.head_dim, self.head_dim, dtype=torch.float32)
        found = []
        for queries, keys, values in zip(*(part.float().split(self.block_size, 2) for part in parts), strict=True):
            attended, held = self._block(queries, keys, values, held)
            found.append(attended)
        if states is not None:
            states.device = held.device
            states.update_recurrent_state(held)
        rows = torch.cat(found, 2).to(hidden_states.dtype).transpose(1, 2).flatten(2)
        return self.out_proj(self.output_gate(hidden_states).sigmoid() * self.norm(rows)), None

    def _block(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, held: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, heads, n, D] each, and the sum before them -> what they attend to, and the sum behind them."""
        tokens = queries.shape[2]
        numbers = torch.arange(1, self.heads + 1, device=queries.device)
        slopes = (2.0 ** (-8 * numbers / self.heads) * self.decay_of_layer)[:, None, None]
        places = torch.arange(1, tokens + 1, device=queries.device)[:, None]
        apart = places - places.T
        nearer = torch.exp(-slopes * apart.clamp(min=0)) * (apart >= 0)
        attended = (queries @ keys.mT * nearer) @ values + (queries * torch.exp(-slopes * places)) @ held
        behind = (keys * torch.exp(-slopes * (tokens - places))).mT @ values
        return attended, torch.exp(-slopes * tokens) * held + behind


class MiniMaxDecoderLayer(modeling_minimax.MiniMaxDecoderLayer):  # type: ignore[misc]  # the library is untyped
    def __init__(self, config: MiniMaxConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        is_linear = self.block_type == "linear_attention"
        self.self_attn = (MiniMaxLightningAttention if is_linear else MiniMaxAttention)(config, layer_idx)


class MiniMaxLayers(OwnLayers):
    """With a mask for layers of lightning attention, too."""

    forward = Qwen3NextModel.forward


class MiniMaxForCausalLM(OwnForCausalLM):
    config_class = MiniMaxConfig
    layers = MiniMaxLayers
    layer = MiniMaxDecoderLayer
    rotary = MiniMaxM2RotaryEmbedding

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True  # which the library says of no MiniMax but its later ones

    # Decays that older files hold are those of the numbers of heads and layers.
    _keys_to_ignore_on_load_unexpected = (r"\.(slope_rate|(query|key|diagonal)_decay)$",)


for _kind in (kind for kind, package in PACKAGES.items() if package == MiniMaxConfig.model_type):
    CONFIG_MAPPING.register(_kind, MiniMaxConfig, exist_ok=True)
AutoModelForCausalLM.register(MiniMaxConfig, MiniMaxForCausalLM, exist_ok=True)
_CONVERSIONS = get_checkpoint_conversion_mapping(MiniMaxConfig.model_type)
register_checkpoint_conversion_mapping(MiniMaxForCausalLM.__name__, _CONVERSIONS)
