"""How a family's models are written in GGUF files: data only.

A checkpoint's name of a tensor is on the left, the file's on the right; `{n}` stands for a layer, `{e}` in the
checkpoint's name for an expert, of which the file has one stack. What each architecture fixes in llama.cpp's code
instead of in a file's metadata stands here too: nothing is left to a library's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
        how: a name in `engine.checkpoint.gguf.checkpoint.ARRANGEMENTS`.
        sources: their names in the file.
    """

    how: str
    sources: tuple[str, ...]

    def __init__(self, how: str, *sources: str) -> None:
        object.__setattr__(self, "how", how)
        object.__setattr__(self, "sources", sources)


Tensors = Mapping[str, "str | Made"]


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
        computed: metadata by full key and the config so far -> more of it, for what tables cannot say.
        tensors: see above; those that a file lacks are left out.
        unused: tensors of the file that no checkpoint has.
        partial_rotary: whether only a part of each head may be rotated.
    """

    architecture: str
    tensors: Tensors
    when: Callable[[Mapping[str, Any]], bool] | None = None
    config: Mapping[str, str | Key] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    computed: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None
    unused: tuple[str, ...] = ()
    partial_rotary: bool = False


def _both(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for kind in ("weight", "bias")}


_LAYER = "model.layers.{n}"

ENDS: Tensors = {
    **_both("model.embed_tokens", "token_embd"),
    **_both("model.norm", "output_norm"),
    **_both("lm_head", "output"),
}
"""What comes before and after the layers."""
NORMS: Tensors = {
    **_both(f"{_LAYER}.input_layernorm", "blk.{n}.attn_norm"),
    **_both(f"{_LAYER}.post_attention_layernorm", "blk.{n}.ffn_norm"),
}
ATTENTION: Tensors = {
    **_both(f"{_LAYER}.self_attn.q_proj", "blk.{n}.attn_q"),
    **_both(f"{_LAYER}.self_attn.k_proj", "blk.{n}.attn_k"),
    **_both(f"{_LAYER}.self_attn.v_proj", "blk.{n}.attn_v"),
    **_both(f"{_LAYER}.self_attn.o_proj", "blk.{n}.attn_output"),
    **_both(f"{_LAYER}.self_attn.q_norm", "blk.{n}.attn_q_norm"),
    **_both(f"{_LAYER}.self_attn.k_norm", "blk.{n}.attn_k_norm"),
}
ROTATED_ATTENTION: Tensors = {
    **ATTENTION,
    **{
        f"{_LAYER}.self_attn.{which}_proj.{kind}": Made(f"rotary_{which}", f"blk.{{n}}.attn_{which}.{kind}")
        for which in ("q", "k")
        for kind in ("weight", "bias")
    },
}
"""Attention of architectures whose queries and keys are in the order of adjacent pairs."""
FEED_FORWARD: Tensors = {
    **_both(f"{_LAYER}.mlp.gate_proj", "blk.{n}.ffn_gate"),
    **_both(f"{_LAYER}.mlp.up_proj", "blk.{n}.ffn_up"),
    **_both(f"{_LAYER}.mlp.down_proj", "blk.{n}.ffn_down"),
}


def experts(block: str = "mlp", *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Tensors:
    """A router, and experts that the checkpoint has one by one."""
    return {
        f"{_LAYER}.{block}.gate.weight": "blk.{n}.ffn_gate_inp.weight",
        f"{_LAYER}.{block}.experts.{{e}}.{gate}.weight": "blk.{n}.ffn_gate_exps.weight",
        f"{_LAYER}.{block}.experts.{{e}}.{up}.weight": "blk.{n}.ffn_up_exps.weight",
        f"{_LAYER}.{block}.experts.{{e}}.{down}.weight": "blk.{n}.ffn_down_exps.weight",
    }


SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""`expert_gating_func`."""


def routing(*, norm: bool, gating: int = SOFTMAX) -> dict[str, Any]:
    """What a file must not contradict where the library's code fixes how experts are weighed."""
    return {"expert_weights_norm": norm, "expert_gating_func": gating, "expert_weights_scale": 1.0}


DENSE: Tensors = {**ENDS, **NORMS, **ATTENTION, **FEED_FORWARD}
"""A dense model whose names and order are Llama's."""
