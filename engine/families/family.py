"""What a model family needs beyond its config.json and the library: data only, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.families.replies import ReplyForm

FILLS_IN = "fills in many tokens of a text at a time, and Switchyard runs models that write one after another"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvNumbers:
    """Properties of the KV cache that the configuration does not give.

    Attributes:
        attentions: attention blocks per layer.
        keys_are_values: a single head whose keys are also its values, but for layers with a window alone.
        window_heads: factor of key-value heads in sliding-window layers over the others.
    """

    attentions: int = 1
    keys_are_values: bool = False
    window_heads: int = 1


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Experts with a custom gate, `_apply_gate`, that clamps gate and up.

    Attributes:
        pairing: layout of gate and up in the first matrix: one half each, or alternating rows.
        limit: attribute of the experts module: the gate is clamped to at most this, up to +-this.
        alpha: attribute with the steepness of (up + 1) * gate * sigmoid(alpha * gate); empty for silu(gate) * up.
    """

    pairing: Literal["halves", "alternating"]
    limit: str
    alpha: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a sparse block chooses experts.  Strings name attributes of the library's router; empty: it has none.

    Attributes:
        scoring: function applied to the logits.
        table: of the router: the experts of each token, which some layers take instead of choosing.
        weight: of the logits.
        bias: of the logits.
        correction: added to the scores for the choice of experts only; of the router, or else of the block.
        groups: number of expert groups, and how many of them are selected first.
        groups_if: attribute and value that enable `groups`; `None`: always enabled.
        bf16_logits: whether the logits are rounded before the choice.
        normalise: whether the selected experts' weights are normalised to sum to 1, or the attribute that says so.
        least: least sum that they are divided by.
        bf16_shares: whether routing weights are rounded to bf16.
        scale: attribute with the factor of the routing weights; of the router, or else of the block.
    """

    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    table: str = ""
    weight: str = "weight"
    bias: str = ""
    correction: str = ""
    groups: tuple[str, str] | None = None
    groups_if: tuple[str, str] | None = None
    bf16_logits: bool = True
    normalise: bool | str = False
    least: str = ""
    bf16_shares: bool = False
    scale: str = ""


GROUPED_SIGMOID = Router(
    scoring="sigmoid",
    correction="e_score_correction_bias",
    groups=("num_group", "topk_group"),
    bf16_logits=False,
    normalise="norm_topk_prob",
    scale="routed_scaling_factor",
)
"""DeepSeek-V3's, which others took over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPath:
    """The library's classes that the native kernels implement: a few tokens through a layer in two calls.

    Attributes:
        model: an embedding, the layers, a norm and a head, in this order; empty if there is none for text alone (see
            `engine.families.library.WITH_PICTURES`).
        layer: a norm and attention, then a norm and an MLP, each added to its input.
        attention: grouped-query attention, unless `is_latent` (multi-head latent attention, DeepSeek-AI
            2024, "DeepSeek-V2", section 2.1) or `compresses` (what lies behind a window, DeepSeek-AI 2026,
            "DeepSeek-V4", section 2.3).
        delta: the gated delta net, Mamba 2 or short convolution that some layers have in place of attention; empty if
            none has.
        block: the sparse block in place of the MLP; empty for dense families.
        of_one_part: whether a layer is one of both, not one after the other.
        shared: of the layer: the expert that every token goes to besides, which is all where there is no block; empty
            if the block itself has it, or none.
        mlp_parts: of an MLP: gate, which may be empty, up and down, or one for the first two.
        mlp_activation: of an MLP; empty: it is silu, and no attribute.
        router: of the sparse block.
        angles: how the model passes rotary angles to its layers: cosines and sines, each repeated for both halves of a
            head ("twice") or not ("once"), or complex numbers that rotate adjacent pairs; "none": it passes none.
        angles_by_type: whether layers of different `layer_types` rotate by different angles.
        rotates_neighbours: whether dimensions 2i and 2i + 1 are rotated together, and stay where they are.
        rotates: attention module -> whether it rotates at all; `None` if all do.
        after_norms: those of what attention and the MLP add, if there are any.
        norm_offset: added to the weights of all norms.
        last_norm: of the model, before the head.
        head_norms: of queries and keys, where a model has any.
        head_norms_last: whether they come after the rotation.
        norms_all_heads: whether queries' and keys' norms are over all heads together (OLMoE, Muennighoff et al. 2024,
            section 2).
        output: attention's last projection.
        gates_heads: whether queries' projection also gives the gates of what each head gives.
        indexes: how an index that chooses the tokens of attention rotates, if some layers have one; that of grouped
            attention chooses blocks of them.
        passes_choice: whether layers also give what their index has chosen, which the next one is given.
        experts_beside: whether a layer's router and experts are its own, beside an MLP, with norms of their own, and
            what it gives is multiplied (Gemma 4).
        streams: of the layer: what is before and after attention and the MLP where there are several streams of hidden
            states, and of the model what adds up the last ones; norms are in 32 bits then.
        has_multiples: whether embeddings, what layers add, and logits are multiplied (Granite).
        unless: of the configuration: if one of these is set, the model does something else besides.
    """

    model: str = ""
    layer: str
    attention: str
    delta: str = ""
    block: str = ""
    mixer: str = "self_attn"
    mlp: str = "mlp"
    of_one_part: bool = False
    shared: str = ""
    mlp_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    mlp_activation: str = "act_fn"
    router: Router = Router()
    is_latent: bool = False
    compresses: bool = False
    angles: Literal["twice", "once", "complex", "none"] = "twice"
    angles_by_type: bool = False
    rotates_neighbours: bool = False
    rotates: Callable[[Any], bool] | None = None
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after_norms: tuple[str, str] | None = None
    norm_offset: float = 0.0
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    head_norms_last: bool = False
    norms_all_heads: bool = False
    output: str = "o_proj"
    gates_heads: bool = False
    indexes: Literal["", "halves", "neighbours"] = ""
    passes_choice: bool = False
    experts_beside: bool = False
    streams: tuple[str, str, str] | None = None
    has_multiples: bool = False
    unless: tuple[str, ...] = ("clip_qkv",)


def fast_path(prefix: str, block: str = "", router: Router = Router(), **more: Any) -> FastPath:
    """That of a family whose classes have the usual names behind a `prefix`.

    Args:
        block: the sparse block's name behind it; empty for dense families.
        more: fields of `FastPath`, which win.
    """
    usual = {"model": f"{prefix}ForCausalLM", "layer": f"{prefix}DecoderLayer", "attention": f"{prefix}Attention"}
    return FastPath(**{**usual, "block": f"{prefix}{block}" if block else "", "router": router, **more})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """Names in a checkpoint of one more decoder layer, which guesses the token after the next.

    Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2): embedding and hidden state, each with a norm,
    are projected together, go through the layer and a norm, and the model's own head makes logits of them.

    Attributes:
        prefix: of all of them; `{layers}` is the number of the model's layers.
        layer: further prefix of the decoder layer's tensors.
        embedding_norm, hidden_norm, projection, norm: what else there is.
        shared: what is in it once more although the model has it.
    """

    prefix: str = "model.layers.{layers}."
    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    shared: tuple[str, ...] = ("embed_tokens", "shared_head.head")


BESIDE_THE_LAYERS = DraftHead(
    prefix="mtp.",
    layer="layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
)
"""As Qwen names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family; the defaults hold for families without special needs.

    Attributes:
        types: its `model_type`s; empty: the name of the library's package.
        refused: why its models cannot run, completing "it ..."; empty if they can.
        own: whether the library lacks it, and its classes are in `engine.runtime.own`.
        adapter: module and class in `engine.runtime.adapters`, for experts that do not go through the library's
            interface, and layers that cannot go on from where they were.
        with_layer_types: the `model_type` whose code the library uses for configurations that have `layer_types`, if it
            is another one.
        experts_per_token: where the configuration does not give it.
        kv: properties of its KV cache.
        packs_rows: whether layers can take the tokens of many rows as one sequence: they compute each token
            independently except in attention, which uses the library's attention interface with no mask but the causal
            one and sliding windows. Where layers keep extra state (Mamba, delta rules, convolutions), select tokens by
            an index or attend in chunks, each row's mixers are called by themselves, and all else of a layer is
            computed for all rows at once. A test compares each family with the library.
        takes_turns: whether not even that is so: what encodes and decodes, experts that see a whole forward, two
            attentions in a layer, and what is computed between layers.
        rotates_again: whether the library recomputes the whole context when an answer crosses LongRoPE's boundary.
        exact_tokens: configuration -> the longest context within which an answer does not depend on which of its tokens
            are computed together, for a reason specific to this family; `None` if there is no limit.
        gate: the experts' custom gate, if any.
        fast_path: for a few tokens, if the native kernels implement it.
        draft_head: of its models, where they have one.
        replies: how its answers hold reasoning and calls of tools; `None` for what fine-tuned models commonly write.
        mlx_experts: how checkpoints name the matrices that MLX calls `gate_proj`, `up_proj` and `down_proj`, where it
            differs; `None` if its models are not read as MLX stores them.
    """

    types: tuple[str, ...] = ()
    refused: str = ""
    own: bool = False
    adapter: str = ""
    with_layer_types: str = ""
    experts_per_token: int = 0
    kv: KvNumbers = KvNumbers()
    packs_rows: bool = False
    takes_turns: bool = False
    rotates_again: bool = False
    exact_tokens: Callable[[Mapping[str, Any]], int | None] | None = None
    gate: ClampedGate | None = None
    fast_path: FastPath | None = None
    draft_head: DraftHead | None = None
    replies: ReplyForm | None = None
    mlx_experts: Mapping[str, str] | None = None
