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


Tensors = Mapping[str, "str | Made | tuple[str | Made, ...]"]
"""Of several ways to make a tensor the first is taken for which a file has everything."""


class File(Protocol):
    """What a family may ask a file."""

    def value(self, key: Key) -> Any:
        """A scalar or a list of them; the key's default if the file lacks it."""

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""

    def numbers(self, tensor: str) -> list[float]:
        """A small tensor."""

    def rope(self) -> dict[str, Any]:
        """`rope_parameters` as most architectures have them."""

    def unsupported(self, name: str, value: object) -> Exception:
        """The error for a value of a key that the library's code cannot compute with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """A family in GGUF files.

    Attributes:
        architecture: llama.cpp's name; several families may share one.
        when: metadata by full key, but for lists -> whether a file is of this family, if others share its
            architecture.
        config: key of config.json -> key of the metadata; beside those that all architectures have.
        constants: values of config.json that llama.cpp's code fixes.
        fixed: keys of the metadata that must have these values if they are there: the library's code fixes them.
        computed: the file and the config so far -> more of it, for what tables cannot say.
        tensors: see above; those that a file lacks are left out.
        unused: tensors of the file that no checkpoint has.
        head_dim, eps: the keys that give the width of a head and the norms' epsilon.
        partial_rotary: whether only a part of each head may be rotated.
        layered: whether layers may have different numbers of heads: then `computed` says which.
        own_rope: whether `computed` gives `rope_parameters`.
    """

    architecture: str
    tensors: Tensors
    when: Callable[[Mapping[str, Any]], bool] | None = None
    config: Mapping[str, str | Key] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    computed: Callable[[File, Mapping[str, Any]], Mapping[str, Any]] | None = None
    unused: tuple[str, ...] = ()
    head_dim: str = HEAD_DIM
    eps: str = "attention.layer_norm_rms_epsilon"
    partial_rotary: bool = False
    layered: bool = False
    own_rope: bool = False


def both(theirs: str, ours: str) -> dict[str, str]:
    """A layer's weight and its bias."""
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


LAYER = "model.layers.{n}"

ENDS: Tensors = {
    **both("model.embed_tokens", "token_embd"),
    **both("model.norm", "output_norm"),
    **both("lm_head", "output"),
}
"""What comes before and after the layers."""
NORMS: Tensors = {
    **both(f"{LAYER}.input_layernorm", "blk.{n}.attn_norm"),
    **both(f"{LAYER}.post_attention_layernorm", "blk.{n}.ffn_norm"),
}
ATTENTION: Tensors = {
    **both(f"{LAYER}.self_attn.q_proj", "blk.{n}.attn_q"),
    **both(f"{LAYER}.self_attn.k_proj", "blk.{n}.attn_k"),
    **both(f"{LAYER}.self_attn.v_proj", "blk.{n}.attn_v"),
    **both(f"{LAYER}.self_attn.o_proj", "blk.{n}.attn_output"),
    **both(f"{LAYER}.self_attn.q_norm", "blk.{n}.attn_q_norm"),
    **both(f"{LAYER}.self_attn.k_norm", "blk.{n}.attn_k_norm"),
}
ROTATED_ATTENTION: Tensors = {
    **ATTENTION,
    **{
        f"{LAYER}.self_attn.{which}_proj.{kind}": Made(f"rotary_{which}", f"blk.{{n}}.attn_{which}.{kind}")
        for which in ("q", "k")
        for kind in ("weight", "bias")
    },
}
"""Attention of architectures whose queries and keys are in the order of adjacent pairs."""
FEED_FORWARD: Tensors = {
    **both(f"{LAYER}.mlp.gate_proj", "blk.{n}.ffn_gate"),
    **both(f"{LAYER}.mlp.up_proj", "blk.{n}.ffn_up"),
    **both(f"{LAYER}.mlp.down_proj", "blk.{n}.ffn_down"),
}
DRAFT_HEAD: Tensors = {
    f"{LAYER}.{theirs}.weight": f"blk.{{n}}.nextn.{ours}.weight"
    for theirs, ours in {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "shared_head.norm": "shared_head_norm",
    }.items()
}
"""What else a layer that guesses tokens has, under the names of `engine.families.family.DraftHead`."""


def attention(query_norm: str = "q_norm", key_norm: str = "k_norm", output: str = "o_proj") -> Tensors:
    """Attention where a checkpoint has other names for its norms and its output."""
    names = {"q_norm": query_norm, "k_norm": key_norm, "o_proj": output}
    return {".".join(names.get(part, part) for part in name.split(".")): made for name, made in ATTENTION.items()}


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


def shared_expert(name: str) -> Tensors:
    """The expert that every token goes to, of this name."""
    return {
        f"{LAYER}.{name}.{part}_proj.weight": f"blk.{{n}}.ffn_{part}_shexp.weight" for part in ("gate", "up", "down")
    }


def per_layer(file: File, key: str, config: Mapping[str, Any], default: Any = REQUIRED) -> list[Any]:
    """A value for each layer; in the file there may be one for all, and some for layers that predict further."""
    found, layers = file.value(Key(key, default)), config["num_hidden_layers"]
    if not isinstance(found, list):
        return [found] * layers
    if len(found) < layers:
        raise file.unsupported(key, found)
    return found[:layers]


def by_layer(file: File, key: str, config: Mapping[str, Any], kinds: tuple[str, str], period: int = 0) -> list[str]:
    """The kinds of layers: a list of truths says which are of the first, a number when the second comes round.

    Args:
        period: llama.cpp's number for files without the key.
    """
    return [
        kinds[0] if found is True or (found is not False and (not found or (layer + 1) % found)) else kinds[1]
        for layer, found in enumerate(per_layer(file, key, config, period))
    ]


def scale_of_weights(file: File) -> float:
    """The factor of the experts' weights: llama.cpp takes 0, and none, as 1."""
    return float(file.value(Key("expert_weights_scale", 0.0)) or 1.0)


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


SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""`expert_gating_func`."""


def routing(*, norm: bool, gating: int = SOFTMAX) -> dict[str, Any]:
    """What a file must not contradict where the library's code fixes how experts are weighed."""
    return {"expert_weights_norm": norm, "expert_gating_func": gating, "expert_weights_scale": 1.0}


DENSE: Tensors = {**ENDS, **NORMS, **ATTENTION, **FEED_FORWARD}
"""A dense model whose names and order are Llama's."""
