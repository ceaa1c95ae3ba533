"""How a family's models are written in GGUF files: data only.

A checkpoint's name of a tensor is on the left, the file's on the right; `{n}` stands for a layer, `{e}` in the
checkpoint's name for an expert, of which the file has one stack, or a tensor each if `{e}` stands there, too. What each
architecture fixes in llama.cpp's code instead of in a file's metadata stands here too: nothing is left to a library's
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

HEAD_DIM = "attention.key_length"
"""The key that most architectures give the width of a head by."""
ARRAY = "@"
"""What a source begins with that is an array of the metadata; its key follows, without the architecture's name."""
REQUIRED = object()
"""A key without which a model cannot be run."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the metadata, without the architecture's name, and the value where a file may lack it.

    A list of equal numbers, one per layer, counts as that number.
    """

    name: str
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that is made of others.

    Attributes:
        how: a name in `engine.checkpoint.gguf.arrangements.ARRANGEMENTS`.
        sources: their names in the file.
    """

    how: str
    sources: tuple[str, ...]

    def __init__(self, how: str, *sources: str) -> None:
        object.__setattr__(self, "how", how)
        object.__setattr__(self, "sources", sources)


Tensors = dict[str, "str | Made | tuple[str | Made, ...]"]
"""Of several ways to make a tensor the first is taken for which a file has everything."""


class File(Protocol):
    """What a family may ask a file."""

    def value(self, key: Key) -> Any:
        """A scalar or a list of them; the key's default if the file lacks it."""

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor, outermost dimension first."""

    def numbers(self, tensor: str) -> list[float]:
        """A small tensor."""

    def rope(self, rotated: int = 0) -> dict[str, Any]:
        """`rope_parameters` as most architectures have them; of a head `rotated` dimensions, or as many as it says."""

    def unsupported(self, name: str, value: object) -> Exception:
        """The error for a value of a key that the library's code cannot compute with."""


Computed = Callable[[File, Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """A family in GGUF files.

    Attributes:
        architecture: llama.cpp's name; several families may share one.
        model_type: the library's name of the family.
        when: metadata by full key, `None` in place of lists -> whether a file is of this family, if others share its
            architecture.
        config: key of config.json -> key of the metadata; beside those that all architectures have.
        constants: values of config.json that llama.cpp's code fixes.
        fixed: keys of the metadata that must have these values if they are there: the library's code fixes them.
        computed: the file and the config so far -> more of it, for what tables cannot say; one after the other.
        tensors: see above; those that a file lacks are left out.
        unused: tensors of the file that no checkpoint has.
        head_dim, eps: the keys that give the width of a head and the norms' epsilon.
        partial_rotary: whether only a part of each head may be rotated.
        layered: whether layers may have different numbers of heads: then `computed` says which.
        own_rope: whether `computed` gives `rope_parameters`.
        unwritten: why its models are not written to such files; empty if they may be.
    """

    architecture: str
    model_type: str
    tensors: Tensors
    when: Callable[[Mapping[str, Any]], bool] | None = None
    config: Mapping[str, str | Key] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    computed: tuple[Computed, ...] = ()
    unused: tuple[str, ...] = ()
    head_dim: str = HEAD_DIM
    eps: str = "attention.layer_norm_rms_epsilon"
    partial_rotary: bool = False
    layered: bool = False
    own_rope: bool = False
    unwritten: str = ""


def both(theirs: str, ours: str) -> Tensors:
    """A layer's weight and its bias."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


LAYER = "model.layers.{n}"


def layer(names: Mapping[str, str], under: str = "", how: str = "", place: str = LAYER) -> Tensors:
    """Weights, and biases if there are any, of every layer: a checkpoint's name and the file's.

    Args:
        under: what a checkpoint's names begin with.
        how: the arrangement of the weights.
        place: what its names of all layers begin with.
    """
    found: Tensors = {}
    for theirs, ours in names.items():
        name = ".".join(filter(None, (place, under, theirs)))
        found |= both(name, f"blk.{{n}}.{ours}")
        if how:
            found[f"{name}.weight"] = Made(how, f"blk.{{n}}.{ours}.weight")
    return found


def ends(embedding: str = "model.embed_tokens", norm: str = "model.norm") -> Tensors:
    return both(embedding, "token_embd") | both(norm, "output_norm") | both("lm_head", "output")


ENDS = ends()
NORMS = layer({"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"})
_AROUND = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NORMS_AROUND = layer(_AROUND)
"""Norms before and behind attention and the feed-forward block, or some of these."""
LOWERED_NORMS = (
    layer({**_AROUND, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}, how="lowered")
    | {"model.norm.weight": Made("lowered", "output_norm.weight")}
)  # fmt: skip
"""As `NORMS_AROUND`, and all others, of models that multiply by one more than the weight."""


def attention(query_norm: str = "q_norm", key_norm: str = "k_norm", output: str = "o_proj") -> Tensors:
    """Attention, by a checkpoint's names for its norms and its output."""
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", output: "attn_output"}
    return layer({**names, query_norm: "attn_q_norm", key_norm: "attn_k_norm"}, "self_attn")


ATTENTION = attention()
PAIRWISE: Tensors = {
    f"{LAYER}.self_attn.{which}_proj.{kind}": Made(f"rotary_{which}", f"blk.{{n}}.attn_{which}.{kind}")
    for which in ("q", "k")
    for kind in ("weight", "bias")
}
"""Queries and keys in the order of adjacent pairs."""
ROTATED_ATTENTION = ATTENTION | PAIRWISE


def feed_forward(block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Tensors:
    return layer({gate: "ffn_gate", up: "ffn_up", down: "ffn_down"}, block)


FEED_FORWARD = feed_forward()
DENSE: Tensors = ENDS | NORMS | ATTENTION | FEED_FORWARD
"""A dense model whose names and order are Llama's."""
DRAFT_HEAD = layer(
    {
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "eh_proj": "nextn.eh_proj",
        "shared_head.norm": "nextn.shared_head_norm",
    }
)
"""What else a layer that guesses tokens has, under the names of `engine.families.family.DraftHead`."""


def experts(
    block: str = "mlp", *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", router: str = "gate"
) -> Tensors:
    """A router, and experts that the checkpoint has one by one, as files from before April 2024 have them."""
    both_halves = "blk.{n}.ffn_gate_up_exps.weight"
    halves: dict[str, tuple[Made, ...]] = {
        "gate": (Made("first_half", both_halves),),
        "up": (Made("second_half", both_halves),),
    }
    return {
        f"{LAYER}.{block}.{router}.weight": "blk.{n}.ffn_gate_inp.weight",
        **{
            f"{LAYER}.{block}.experts.{{e}}.{theirs}.weight": (
                f"blk.{{n}}.ffn_{ours}_exps.weight",
                *halves.get(ours, ()),
                f"blk.{{n}}.ffn_{ours}.{{e}}.weight",
            )
            for ours, theirs in {"gate": gate, "up": up, "down": down}.items()
        },
    }


def stacked_experts(name: str) -> Tensors:
    """Experts that the checkpoint has in stacks, too."""
    return {
        f"{LAYER}.{name}.gate_up_proj": (
            "blk.{n}.ffn_gate_up_exps.weight",
            Made("joined", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"),
        ),
        f"{LAYER}.{name}.down_proj": "blk.{n}.ffn_down_exps.weight",
    }


def shared_expert(name: str) -> Tensors:
    """The expert that every token goes to, of this name."""
    return layer({f"{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}, name)


def correction(name: str, how: str = "") -> Tensors:
    """What is added to the scores for the choice of experts only, by its name in a layer."""
    return {f"{LAYER}.{name}": (Made(how, "blk.{n}.exp_probs_b.bias"), Made(how, "blk.{n}.exp_probs_b"))}


TIMES = {"num_experts_per_tok": "expert_used_count"}
EXPERTS: dict[str, str | Key] = {"num_experts": "expert_count", **TIMES}
LOCAL_EXPERTS: dict[str, str | Key] = {"num_local_experts": "expert_count", **TIMES}
GROUPS = {"n_group": Key("expert_group_count", 1), "topk_group": Key("expert_group_used_count", 1)}
ROUTED_EXPERTS: dict[str, str | Key] = {
    "n_routed_experts": "expert_count",
    **TIMES,
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": Key("expert_shared_count", 0),
    "first_k_dense_replace": Key("leading_dense_block_count", 0),
    **GROUPS,
    "norm_topk_prob": Key("expert_weights_norm", False),
}
"""DeepSeek's."""
OWN_WIDTH: dict[str, str | Key] = {"moe_intermediate_size": "expert_feed_forward_length"}
SHARED_WIDTH: dict[str, str | Key] = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""`expert_gating_func`."""


def routing(*, norm: bool, gating: int = SOFTMAX) -> dict[str, Any]:
    """What a file must not contradict where the library's code fixes how experts are weighed."""
    return {"expert_weights_norm": norm, "expert_gating_func": gating, "expert_weights_scale": 1.0}


def per_layer(file: File, key: str, config: Mapping[str, Any], default: Any = REQUIRED) -> list[Any]:
    """A value for each layer; in the file there may be one for all, and some for layers that predict further."""
    found, layers = file.value(Key(key, default)), config["num_hidden_layers"]
    if not isinstance(found, list):
        return [found] * layers
    if len(found) < layers:
        raise file.unsupported(key, found)
    return found[:layers]


def by_layer(
    file: File, key: str, config: Mapping[str, Any], kinds: tuple[str, str], period: int = 0, *, first: bool = False
) -> list[str]:
    """The kinds of layers: a list of truths says which are of the first, a number when the second comes round.

    Args:
        period: llama.cpp's number for files without the key.
        first: whether the second is the first of a period instead of its last.
    """
    found = file.value(Key(key, period))
    if isinstance(found, list) or type(found) is bool:
        return [kinds[not each] for each in per_layer(file, key, config)]
    return [kinds[bool(found) and (n + (not first)) % found == 0] for n in range(config["num_hidden_layers"])]


def windows(period: int = 0, *, first: bool = False) -> Computed:
    """Layers with and without a sliding window; `period` is of files that do not say which are, see `by_layer`."""

    def layer_types(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
        window, key = file.value(Key("attention.sliding_window", 0)), "attention.sliding_window_pattern"
        kinds = ("sliding_attention", "full_attention")
        layers = by_layer(file, key, config, kinds, period if window else 1, first=first)
        return {"layer_types": layers, "sliding_window": window or None}

    return layer_types


def heads_of_some(other: str, attention: str = "full_attention") -> Computed:
    """Layers without attention, which is told by their having no heads, are of the kind `other`."""

    def layer_types(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
        heads = per_layer(file, "attention.head_count_kv", config)
        return {
            "num_key_value_heads": of_one_value(file, "attention.head_count_kv", heads),
            "layer_types": [attention if count else other for count in heads],
        }

    return layer_types


def scale_of_weights(file: File) -> float:
    """The factor of the experts' weights: llama.cpp takes 0, and none, as 1."""
    return float(file.value(Key("expert_weights_scale", 0.0)) or 1.0)


def scaled(file: File, _config: Mapping[str, Any]) -> dict[str, Any]:
    """The factor of the experts' weights, by its usual name."""
    return {"routed_scaling_factor": scale_of_weights(file)}


def which_are_sparse(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return {
        "mlp_layer_types": ["sparse" if file.has(f"blk.{n}.ffn_gate_inp.weight") else "dense" for n in layers],
    }


def has_query_norm(file: File, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_qk_norm": file.has("blk.0.attn_q_norm.weight")}


def two_thetas(sliding: float | None = None) -> Computed:
    """Rotary embeddings of layers with a sliding window and of others, which alone may be scaled.

    Args:
        sliding: llama.cpp's base of the former for files without it; `None`: that of the others.
    """

    def rope_parameters(file: File, _config: Mapping[str, Any]) -> dict[str, Any]:
        full = file.rope()
        theta = file.value(Key("rope.freq_base_swa", sliding or full["rope_theta"]))
        return {
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": theta},
            }
        }

    return rope_parameters


def longrope(file: File, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_parameters` of models with factors for short and for long contexts; `None` for those without."""
    if not file.has("rope_factors_long.weight"):
        return None
    original = file.value(Key("rope.scaling.original_context_length", config["max_position_embeddings"]))
    return {
        "rope_type": "longrope",
        "rope_theta": file.value(Key("rope.freq_base", 10_000.0)),
        "short_factor": file.numbers("rope_factors_short.weight"),
        "long_factor": file.numbers("rope_factors_long.weight"),
        "original_max_position_embeddings": original,
        "factor": config["max_position_embeddings"] / original,
        "attention_factor": file.value(Key("rope.scaling.attn_factor", 1.0)),
    }


def of_one_value(file: File, key: str, values: Sequence[int]) -> int:
    """The only value of a list that is not 0."""
    others = {value for value in values if value}
    if len(others) != 1:
        raise file.unsupported(key, values)
    return others.pop()
