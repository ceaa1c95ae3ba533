"""What models of our own are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts


def add(config: Any, model: Any, conversions: Sequence[Any]) -> None:
    """Puts a family where the library looks for its own."""
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, model)
    register_checkpoint_conversion_mapping(config.model_type, list(conversions))


@strict
class OwnConfig(PreTrainedConfig):  # type: ignore[misc]  # the library is untyped
    vocab_size: int = 32000
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        if "sliding_attention" not in self.layer_types:
            self.sliding_window = None  # of no use, which those who count keys and values do not know
        super().__post_init__(**kwargs)


def _first_values(model: Any, module: torch.nn.Module) -> None:
    PreTrainedModel._init_weights(model, module)
    for parameter in module.parameters(recurse=False):
        if parameter.dim() > 1:
            initialization.normal_(parameter, mean=0.0, std=model.config.initializer_range)


class OwnLayers(Qwen2Model):  # type: ignore[misc]  # the library is untyped
    """An embedding, layers and a norm, with a mask by the kind of each layer.

    Args:
        layer: configuration and number -> a layer.
        norm: configuration -> the last norm.
        rotary: configuration -> what gives the angles of positions.
    """

    def __init__(
        self,
        config: Any,
        layer: Callable[[Any, int], torch.nn.Module],
        norm: Callable[[Any], torch.nn.Module],
        rotary: Callable[[Any], torch.nn.Module],
    ) -> None:
        super(Qwen2Model, self).__init__(config)  # its own layers are others
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = torch.nn.ModuleList([layer(config, number) for number in range(config.num_hidden_layers)])
        self.norm = norm(config)
        self.rotary_emb = rotary(config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        self.post_init()

    _init_weights = _first_values


class OwnLayer(LlamaDecoderLayer):  # type: ignore[misc]  # the library is untyped
    """A norm and attention, then a norm and a feed-forward block, each added to its input."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx


class OwnForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]  # the library is untyped
    """Layers and a head.

    Attributes:
        layers: all of them.
        layer, norm, rotary: see `OwnLayers`.
    """

    layers: Callable[..., torch.nn.Module] = OwnLayers
    layer: Callable[[Any, int], torch.nn.Module] = OwnLayer
    rotary: Callable[[Any], torch.nn.Module] = LlamaRotaryEmbedding

    def __init__(self, config: Any) -> None:
        super(Qwen2ForCausalLM, self).__init__(config)
        kind = type(self)
        self.model = kind.layers(config, kind.layer, kind.norm, kind.rotary)
        self.vocab_size = config.vocab_size
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def norm(config: Any) -> torch.nn.Module:
        found: torch.nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        return found

    _init_weights = _first_values


def alone(layers: Callable[[Any], torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """The library's layers of a part that writes text, for a model that is this part alone."""
    return lambda config, *_parts: layers(config)


class SideBySideLayer(OwnLayer):
    """A layer whose experts see, or are chosen by, what comes before its attention."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.mlp

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        return self.behind(hidden_states, hidden_states + attended)

    def behind(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The layer's result, from what comes before attention and behind it."""
        raise NotImplementedError


class OwnMoE(torch.nn.Module):
    """A router and experts, and in some models shared experts in one.

    Attributes:
        router_name: what checkpoints call it.
    """

    router_name = "gate"

    def __init__(self, router: torch.nn.Module, experts: Any, shared: torch.nn.Module | None = None) -> None:
        super().__init__()
        setattr(self, self.router_name, router)
        self.experts, self.shared_experts = experts, shared

    def forward(self, hidden_states: torch.Tensor, scored: torch.Tensor | None = None) -> torch.Tensor:
        """[B, S, H], and what the router scores where that is something else -> [B, S, H]."""
        rows = hidden_states.flatten(0, -2)
        _, weights, index = getattr(self, self.router_name)(rows if scored is None else scored.flatten(0, -2))
        out = self.routed(rows, index, weights.to(rows.dtype)).view(hidden_states.shape)
        return out if self.shared_experts is None else out + self.shared_experts(hidden_states)

    def routed(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] with their experts [T, k] and weights -> [T, H]."""
        out: torch.Tensor = self.experts(rows, index, weights)
        return out


def experts(config: Any, count: int, width: int, activation: str = "silu") -> Any:
    """Gated experts in the library's standard layout."""
    own = copy(config)
    own.num_experts, own.moe_intermediate_size, own.hidden_act = count, width, activation
    return Qwen2MoeExperts(own)


def stacked(source: str, target: str, gate: str, up: str, down: str) -> list[Any]:
    """Makes stacks of experts that a checkpoint has one by one, as `{source}.{e}.{gate}.weight`."""
    return [
        WeightConverter(
            [f"{source}.*.{gate}.weight", f"{source}.*.{up}.weight"],
            f"{target}.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter([f"{source}.*.{down}.weight"], f"{target}.down_proj", [MergeModulelist(dim=0)]),
    ]
