"""How the parts that see are written in `mmproj` files: data only.

A module of the library's model is on the left, the file's on the right, for its weight, and its bias if the file has
one; `{n}` stands for a layer.  What is a tensor by itself, or made of several, is among `tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine.families.gguf import Made

OWN = "own"
"""In place of the text side's name, if it is the same in the whole model."""
_MOST_TOKENS, _LEAST_TOKENS = 4096, 8
"""That llama.cpp makes of a picture where neither file nor makers say."""


class Said(Protocol):
    """What a tower may ask its file; what is absent or makes no sense is an error."""

    def __call__(self, name: str, default: int | None = None) -> int:
        """A number above zero, by its key without `clip.vision.`."""

    def real(self, name: str, default: float) -> float:
        """The same of any kind."""

    def listed(self, name: str) -> list[Any]:
        """An array of whole numbers or truths; empty if there is none."""

    def is_set(self, key: str) -> bool:
        """Whether a key, with its whole name, is true."""

    def has(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""

    def shape(self, tensor: str, rank: int) -> tuple[int, ...]:
        """Of a tensor with so many dimensions, outermost first."""


Asked = Callable[[Said], dict[str, Any]]


def _nothing(_said: Said) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """How models of a family see.

    Attributes:
        whole: the library's name of the model.
        architectures: llama.cpp's names of the language model.
        joiner: its name of what joins the tower to that.
        text: the library's name of the text side, where this is not run by itself but in the whole model.
        mark: the token in place of which pictures are put.
        begins: what the names of the whole's tensors begin with.
        modules, tensors: see above; `{layer}` stands for `layers` and its number.
        extras: tensors that a file may lack.
        layers: what both names of the modules of a layer begin with; those are in `layer`.
        vision: the tower's configuration, beside what `common` says.
        config: that of the whole.
        preprocessor: as its preprocessor_config.json would be.
    """

    whole: str
    architectures: tuple[str, ...]
    joiner: str
    text: str = ""
    mark: str = "<|image_pad|>"
    begins: str = "model."
    modules: Mapping[str, str]
    layers: str
    layer: Mapping[str, str]
    tensors: Mapping[str, Made] = field(default_factory=dict)
    extras: Mapping[str, Made] = field(default_factory=dict)
    vision: Asked = _nothing
    config: Asked = _nothing
    preprocessor: Asked = _nothing


def common(said: Said) -> dict[str, Any]:
    """What every tower has, by all names for it in the library: a family's configuration takes those that it has."""
    layers, heads, width = said("block_count"), said("attention.head_count"), said("embedding_length")
    eps = said.real("attention.layer_norm_epsilon", 1e-6)
    return {
        "depth": layers,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": said("feed_forward_length"),
        "num_heads": heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": max(1, width // heads),
        "out_hidden_size": said("projection_dim"),
        "patch_size": said("patch_size"),
        "spatial_merge_size": said("spatial_merge_size", said("projector.scale_factor", 2)),
        "temporal_patch_size": 2,
        "in_channels": 3,
        "rms_norm_eps": eps,
        "layer_norm_eps": eps,
    }


def _pixels(least: int = _LEAST_TOKENS, most: int = _MOST_TOKENS, frames: int = 2) -> Asked:
    """Pictures of as many pixels as the file says, or as make so many tokens."""

    def preprocessor(said: Said) -> dict[str, Any]:
        patch, merge = said("patch_size"), common(said)["spatial_merge_size"]
        side = (patch * merge) ** 2
        return {
            "patch_size": patch,
            "merge_size": merge,
            "temporal_patch_size": frames,
            "min_pixels": said("image_min_pixels", least * side),
            "max_pixels": said("image_max_pixels", most * side),
        }

    return preprocessor


_FRAMES = Made("frames", "v.patch_embd.weight", "v.patch_embd.weight.1")
_GATED = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_PLAIN = {"mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_BLOCK = {"norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out"}


def _projections(output: str = "o_proj", under: str = "self_attn") -> dict[str, str]:
    names = {f"{under}.{each}_proj": f"attn_{each}" for each in "qkv"}
    return {**names, f"{under}.{output}": "attn_out"}


def _of_heads(how: Mapping[str, str], under: str, source: str) -> dict[str, Made]:
    """Queries, keys or values of which a file has the rows in another order."""
    return {
        f"{{layer}}.{under}.{each}_proj.{kind}": Made(name, f"v.blk.{{n}}.{source.format(each)}.{kind}")
        for each, name in how.items()
        for kind in ("weight", "bias")
    }


def _qwen2_5(said: Said) -> dict[str, Any]:
    layers, period = said("block_count"), said("n_wa_pattern", 8)
    whole = list(range(period - 1, layers, period))
    return {"hidden_act": "silu", "window_size": said("window_size", 112), "fullatt_block_indexes": whole}


def _qwen2(said: Said) -> dict[str, Any]:
    width = said("embedding_length")
    ratio = max(1, said.shape("v.blk.0.ffn_up.weight", 2)[0] // width)
    return {"embed_dim": width, "hidden_size": said("projection_dim"), "mlp_ratio": ratio, "hidden_act": "quick_gelu"}


_QWEN2 = Tower(
    whole="qwen2_vl",
    architectures=("qwen2vl",),
    joiner="qwen2vl_merger",
    text="qwen2_vl_text",
    modules={
        "visual.merger.ln_q": "v.post_ln",
        "visual.merger.mlp.0": "mm.0",
        "visual.merger.mlp.2": "mm.2",
    },
    layers="visual.blocks",
    layer={**_BLOCK, **_PLAIN},
    tensors={
        "visual.patch_embed.proj.weight": _FRAMES,
        "{layer}.attn.qkv.weight": Made("joined", *(f"v.blk.{{n}}.attn_{each}.weight" for each in "qkv")),
        "{layer}.attn.qkv.bias": Made("joined_numbers", *(f"v.blk.{{n}}.attn_{each}.bias" for each in "qkv")),
    },
    vision=_qwen2,
    preprocessor=_pixels(),
)
_QWEN2_5 = replace(
    _QWEN2,
    whole="qwen2_5_vl",
    joiner="qwen2.5vl_merger",
    text="qwen2_5_vl_text",
    layer={**_BLOCK, **_GATED},
    vision=_qwen2_5,
)


def _qwen3(said: Said) -> dict[str, Any]:
    deep = [at for at, is_deep in enumerate(said.listed("is_deepstack_layers")) if is_deep]
    places = said.shape("v.position_embd.weight", 2)[0]
    return {
        "num_position_embeddings": places,
        "deepstack_visual_indexes": deep,
        "hidden_act": "gelu_pytorch_tanh",
    }


_QWEN3 = Tower(
    whole="qwen3_vl",
    architectures=("qwen3vl",),
    joiner="qwen3vl_merger",
    text="qwen3_vl_text",
    modules={
        "visual.patch_embed.proj": "v.patch_embd",
        "visual.pos_embed": "v.position_embd",
        "visual.merger.norm": "v.post_ln",
        "visual.merger.linear_fc1": "mm.0",
        "visual.merger.linear_fc2": "mm.2",
        "visual.deepstack_merger_list.{deep}.norm": "v.deepstack.{n}.norm",
        "visual.deepstack_merger_list.{deep}.linear_fc1": "v.deepstack.{n}.fc1",
        "visual.deepstack_merger_list.{deep}.linear_fc2": "v.deepstack.{n}.fc2",
    },
    layers="visual.blocks",
    layer={**_BLOCK, "attn.qkv": "attn_qkv", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
    tensors={"visual.patch_embed.proj.weight": _FRAMES},
    vision=_qwen3,
    preprocessor=_pixels(),
)


def _glm(said: Said) -> dict[str, Any]:
    has_biases = said.has("v.blk.0.attn_qkv.bias")
    return {"hidden_act": "silu", "image_size": said("image_size"), "attention_bias": has_biases}


def _glm5(said: Said) -> dict[str, Any]:
    return {
        **_glm(said),
        "projection_intermediate_size": said.shape("mm.up.weight", 2)[0],
        "swiglu_limit": said.real("swiglu_clamp", 10.0),
    }


def _glm5_tokens(said: Said) -> dict[str, Any]:
    made = _pixels()(said)
    side = (made["patch_size"] * made["merge_size"]) ** 2
    least, most = (max(1, made.pop(f"{end}_pixels") // side) for end in ("min", "max"))
    return {**made, "min_image_tokens": least, "max_image_tokens": most}


_GLM = Tower(
    whole="glm4v_moe",
    architectures=("glm4moe",),
    joiner="glm4v",
    text="glm4v_moe_text",
    mark="<|image|>",
    modules={
        "visual.patch_embed.proj": "v.patch_embd",
        "visual.post_conv_layernorm": "v.norm_embd",
        "visual.embeddings.position_embedding": "v.position_embd",
        "visual.post_layernorm": "v.post_ln",
        "visual.downsample": "mm.patch_merger",
        "visual.merger.proj": "mm.model.fc",
        "visual.merger.post_projection_norm": "mm.post_norm",
        **{f"visual.merger.{part}_proj": f"mm.{part}" for part in ("gate", "up", "down")},
    },
    layers="visual.blocks",
    layer={**_BLOCK, **_GATED, "attn.qkv": "attn_qkv"},
    tensors={"visual.patch_embed.proj.weight": _FRAMES},
    vision=_glm,
)
_ABSENT = ("visual.post_conv_layernorm", "visual.embeddings.position_embedding")
_GLM5 = replace(
    _GLM,
    whole="glm5_next",
    architectures=("glm5-next",),
    joiner="glm5v",
    text=OWN,
    modules={ours: its for ours, its in _GLM.modules.items() if ours not in _ABSENT},
    layer={**_GLM.layer, "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"},
    vision=_glm5,
    preprocessor=_glm5_tokens,
)


def _gemma4(said: Said) -> dict[str, Any]:
    merge = said("projector.scale_factor", 3)
    return {
        "model_type": "gemma4_vision",
        "pooling_kernel_size": merge,
        "spatial_merge_size": merge,
        "position_embedding_size": said.shape("v.position_embd.weight", 3)[1],
        "standardize": said.has("v.std_scale"),
        "use_clipped_linears": said.has("v.blk.0.attn_q.input_max"),
    }


def _llama4(said: Said) -> dict[str, Any]:
    first, second, joiner = (said.shape(f"mm.model.{name}.weight", 2) for name in ("mlp.1", "mlp.2", "fc"))
    return {
        "image_size": said("image_size"),
        "pixel_shuffle_ratio": 1 / said("projector.scale_factor", 2),
        "projector_input_dim": first[0],
        "projector_output_dim": second[0],
        "vision_output_dim": joiner[1],
    }


def _kimi(said: Said, most: int) -> dict[str, Any]:
    patch = said("patch_size")
    patches = max(1, said("image_max_pixels", most * patch**2) // patch**2)
    return {"patch_size": patch, "merge_size": said("projector.scale_factor", 2), "max_patches": patches}


def _kimi_vision(said: Said, rank: int) -> dict[str, Any]:
    merge, side = said("projector.scale_factor", 2), said.shape("v.position_embd.weight", rank)[0]
    side = side if rank == 3 else math.isqrt(side)
    return {"merge_kernel_size": [merge, merge], "pos_emb_height": side, "pos_emb_width": side}


_KIMI_K2_5 = Tower(
    whole="kimi_k25",
    architectures=("deepseek2",),
    joiner="kimik25",
    text=OWN,
    mark="<|media_pad|>",
    modules={
        "vision_tower.patch_embed.proj": "v.patch_embd",
        "vision_tower.final_layernorm": "v.post_ln",
        "mm_projector.pre_norm": "mm.input_norm",
        "mm_projector.in_proj": "mm.1",
        "mm_projector.out_proj": "mm.2",
    },
    layers="vision_tower.layers",
    layer={**_BLOCK, **_PLAIN},
    tensors={
        "vision_tower.patch_embed.pos_emb.position_embeddings": Made("", "v.position_embd.weight"),
        **_of_heads({"q": "kimi_q", "k": "kimi_k", "v": "third_v"}, "attn", "attn_qkv"),
    },
    vision=lambda said: _kimi_vision(said, 3),
    config=lambda said: {"projection_hidden_size": said("embedding_length")},
    preprocessor=lambda said: _kimi(said, 16384),
)


def _step(said: Said) -> dict[str, Any]:
    ratio = (said("feed_forward_length") + 0.5) / said(
        "embedding_length"
    )  # which the library multiplies and rounds down
    return {"image_size": said("image_size"), "hidden_act": "quick_gelu", "mlp_ratio": ratio}


def _dots3(said: Said) -> dict[str, Any]:
    width, merge = said("embedding_length"), said("spatial_merge_size", 2)
    layers = said("block_count")
    counts = [*said.listed("expert_count_per_layer"), *[0] * layers][:layers]
    used = said("expert_used_count", 2)
    sparse = next((n for n, count in enumerate(counts) if count), None)
    inner = said.shape(f"v.blk.{sparse}.ffn_up_exps.weight", 3)[1] if sparse is not None else width
    return {
        "hidden_act": "silu",
        "adapter_in_dim": width,
        "adapter_out_dim": said("projection_dim"),
        "adapter_merge_size": merge,
        "moe_intermediate_size": inner,
        "num_experts_per_tok": used,
        "mlp_layer_types": ["sparse" if count else "dense" for count in counts],
        "per_layer_config": {
            n: {"num_local_experts": count, "num_experts_per_tok": min(used, count)}
            for n, count in enumerate(counts)
            if count
        },
    }


_EXPERTS = {
    **{f"{{layer}}.{ours}.weight": Made("", f"v.blk.{{n}}.{its}.weight") for ours, its in _GATED.items()},
    "{layer}.mlp.experts.gate_up_proj": Made(
        "joined", *(f"v.blk.{{n}}.ffn_{part}_exps.weight" for part in ("gate", "up"))
    ),
    "{layer}.mlp.experts.down_proj": Made("", "v.blk.{n}.ffn_down_exps.weight"),
    "{layer}.mlp.gate.weight": Made("", "v.blk.{n}.ffn_gate_inp.weight"),
    "{layer}.mlp.e_score_correction_bias": Made("", "v.blk.{n}.exp_probs_b.weight"),
}


UNREAD = {
    "bailingmoe3": "the library has no model of Ling 3 that sees",
    "deepseek4": "the library has no model of DeepSeek-V4 that sees",
    "ernie4_5-moe": "llama.cpp writes no mmproj files of ERNIE 4.5 VL: use the model's safetensors version",
    "hy_v4": "llama.cpp writes no mmproj files of Hy 4: use the model's safetensors version",
    "mimo2": "the library has no model of MiMo-V2 that sees",
}
"""Language models of which others see -> why they do not here, completing a sentence."""
TOWERS = (
    Tower(
        whole="gemma3",
        architectures=("gemma3",),
        joiner="gemma3",
        text="gemma3_text",
        mark="<start_of_image>",
        modules={
            "vision_tower.embeddings.patch_embedding": "v.patch_embd",
            "vision_tower.embeddings.position_embedding": "v.position_embd",
            "vision_tower.post_layernorm": "v.post_ln",
        },
        layers="vision_tower.encoder.layers",
        layer={"layer_norm1": "ln1", "layer_norm2": "ln2", **_projections("out_proj"), **_PLAIN},
        tensors={
            "multi_modal_projector.mm_input_projection_weight": Made("", "mm.input_projection.weight"),
            "multi_modal_projector.mm_soft_emb_norm.weight": Made("lowered", "mm.soft_emb_norm.weight"),
        },
        vision=lambda said: {
            "model_type": "siglip_vision_model",
            "image_size": said("image_size"),
            "vision_use_head": False,
        },
        config=lambda said: {
            "mm_tokens_per_image": (said("image_size") // said("patch_size") // said("projector.scale_factor", 4)) ** 2
        },
    ),
    Tower(
        whole="gemma4",
        architectures=("gemma4",),
        joiner="gemma4v",
        text="gemma4_text",
        mark="<|image|>",
        modules={"embed_vision.embedding_projection": "mm.input_projection"},
        layers="vision_tower.encoder.layers",
        layer={
            "input_layernorm": "ln1",
            "post_attention_layernorm": "attn_post_norm",
            "pre_feedforward_layernorm": "ln2",
            "post_feedforward_layernorm": "ffn_post_norm",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            **{f"{ours}.linear": its for ours, its in {**_projections(), **_GATED}.items()},
        },
        tensors={
            "vision_tower.patch_embedder.input_proj.weight": Made("colours_last", "v.patch_embd.weight"),
            "vision_tower.patch_embedder.position_embedding_table": Made("", "v.position_embd.weight"),
        },
        extras={
            **{f"vision_tower.std_{each}": Made("", f"v.std_{each}") for each in ("scale", "bias")},
            **{
                f"{{layer}}.{ours}.{way}put_{end}": Made("scalar", f"v.blk.{{n}}.{its}.{way}put_{end}")
                for ours, its in {**_projections(), **_GATED}.items()
                for way in ("in", "out")
                for end in ("min", "max")
            },
        },
        vision=_gemma4,
    ),
    _GLM,
    replace(_GLM, whole="glm4v", architectures=("glm4",), text="glm4v_text"),
    _GLM5,
    _KIMI_K2_5,
    # Kimi-VL's tower is the same without films, whose queries and keys are as its makers have them.
    replace(
        _KIMI_K2_5,
        joiner="kimivl",
        layer={**_BLOCK, **_PLAIN, "attn.v_proj": "attn_v"},
        tensors={
            "vision_tower.patch_embed.pos_emb.position_embeddings": Made("square", "v.position_embd.weight"),
            **_of_heads(dict.fromkeys("qk", "rotary_q"), "attn", "attn_{}"),
        },
        vision=lambda said: _kimi_vision(said, 2),
        preprocessor=lambda said: _kimi(said, 4096),
    ),
    Tower(
        whole="llama4",
        architectures=("llama4",),
        joiner="llama4",
        mark="<|patch|>",
        begins="",
        modules={
            "vision_model.patch_embedding.linear": "v.patch_embd",
            "vision_model.layernorm_pre": "v.pre_ln",
            "vision_model.layernorm_post": "v.post_ln",
            "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
            "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
            "multi_modal_projector.linear_1": "mm.model.fc",
        },
        layers="vision_model.model.layers",
        layer={"input_layernorm": "ln1", "post_attention_layernorm": "ln2", **_projections(), **_PLAIN},
        tensors={
            "vision_model.class_embedding": Made("", "v.class_embd"),
            "vision_model.positional_embedding_vlm": Made("", "v.position_embd.weight"),
        },
        vision=_llama4,
    ),
    Tower(
        whole="minimax_m3_vl",
        architectures=("minimax-m3",),
        joiner="minimax_m3",
        text=OWN,
        mark="]<]image[>[",
        modules={
            "vision_tower.pre_layrnorm": "v.pre_ln",
            "multi_modal_projector.linear_1": "mm.1",
            "multi_modal_projector.linear_2": "mm.2",
            "multi_modal_projector.merge_linear_1": "mm.merger.fc1",
            "multi_modal_projector.merge_linear_2": "mm.merger.fc2",
        },
        layers="vision_tower.layers",
        layer={
            "layer_norm1": "ln1",
            "layer_norm2": "ln2",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_out",
            **_PLAIN,
        },
        tensors={
            "vision_tower.embeddings.proj.weight": _FRAMES,
            **_of_heads(dict.fromkeys("qk", "three_axes"), "self_attn", "attn_{}"),
        },
        config=lambda said: {"projector_hidden_size": said.shape("mm.1.weight", 2)[0]},
    ),
    Tower(
        whole="mistral3",
        architectures=("llama", "mistral3", "mistral4"),
        joiner="pixtral",
        text=OWN,
        mark="[IMG]",
        modules={
            "vision_tower.patch_conv": "v.patch_embd",
            "vision_tower.ln_pre": "v.pre_ln",
            "multi_modal_projector.norm": "mm.input_norm",
            "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
            "multi_modal_projector.linear_1": "mm.1",
            "multi_modal_projector.linear_2": "mm.2",
        },
        layers="vision_tower.transformer.layers",
        layer={
            "attention_norm": "ln1",
            "ffn_norm": "ln2",
            "attention.v_proj": "attn_v",
            "attention.o_proj": "attn_out",
            **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        },
        tensors={
            f"{{layer}}.attention.{each}_proj.weight": Made("rotary_q", f"v.blk.{{n}}.attn_{each}.weight")
            for each in "qk"
        },
        vision=lambda said: {
            "model_type": "pixtral",
            "image_size": said("image_size"),
            "spatial_merge_size": said("spatial_merge_size", 1),
            "hidden_act": "silu" if said.is_set("clip.use_silu") else "gelu",
        },
        config=lambda said: {
            "spatial_merge_size": said("spatial_merge_size", 1),
            "multimodal_projector_bias": False,
        },
    ),
    _QWEN2,
    _QWEN2_5,
    _QWEN3,
    replace(_QWEN3, whole="qwen3_vl_moe", architectures=("qwen3vlmoe",), text="qwen3_vl_moe_text"),
    *(
        replace(_QWEN3, whole=whole, architectures=(architecture,), text="")
        for whole, architecture in (("qwen3_5", "qwen35"), ("qwen3_5_moe", "qwen35moe"), ("qwen4_exp", "qwen4exp"))
    ),
    Tower(
        whole="dots3_note",
        architectures=("dots3note",),
        joiner="dots3note_v",
        mark="<|imgpad|>",
        modules={
            "vision_tower.patch_embed.proj": "v.patch_embd",
            "vision_tower.patch_embed.norm": "v.pre_ln",
            "vision_tower.norm": "mm.post_norm",
            "vision_tower.merger.ln_q": "mm.input_norm",
            "vision_tower.merger.mlp.0": "mm.0",
            "vision_tower.merger.mlp.2": "mm.2",
        },
        layers="vision_tower.blocks",
        layer={
            **_BLOCK,
            "attn.qkv": "attn_qkv",
            "attn.q_norm": "attn_q_norm",
            "attn.k_norm": "attn_k_norm",
        },
        extras=_EXPERTS,
        vision=_dots3,
        config=lambda said: {"audio_config": {"adapter_out_dim": said("projection_dim")}},
        preprocessor=_pixels(frames=1),
    ),
    Tower(
        whole="step3p7",
        architectures=("step35",),
        joiner="step3vl",
        text=OWN,
        mark="<im_patch>",
        modules={
            "vision_model.embeddings.patch_embedding": "v.patch_embd",
            "vision_model.embeddings.position_embedding": "v.position_embd",
            "vision_model.pre_layernorm": "v.pre_ln",
            "vision_model.downsampler1": "mm.0",
            "vision_model.downsampler2": "mm.1",
            "multi_modal_projector": "mm.model.fc",
        },
        layers="vision_model.layers",
        layer={"layernorm_before": "ln1", "layernorm_after": "ln2", "self_attn.out_proj": "attn_out", **_PLAIN},
        tensors={
            **_of_heads({"q": "pairs_q", "k": "pairs_k", "v": "third_v"}, "self_attn", "attn_qkv"),
            **{f"{{layer}}.lambda_{at}": Made("", f"v.blk.{{n}}.ls{at}.weight") for at in (1, 2)},
        },
        vision=_step,
        preprocessor=lambda said: {"max_image_size": said("preproc_image_size", 3024)},
    ),
)
