"""The part of a GGUF model that sees: the `mmproj` file beside it, as llama.cpp's converter writes it.

Its tower becomes that of the library's model: a configuration of the whole, and tensors by the names that checkpoints
have for them.  What belongs to another model is refused in a sentence when a picture is sent, and text goes on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.checkpoint.gguf.arrangements import ARRANGEMENTS
from engine.checkpoint.gguf.file import GgufFile, Strings, read_gguf, read_projector
from engine.checkpoint.gguf.names import SUFFIX
from engine.checkpoint.headers import TensorEntry
from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import open_untrusted, reason


class _Kind(NamedTuple):
    """How models of one of llama.cpp's architectures see.

    Attributes:
        whole: the library's name of the model.
        joiner: llama.cpp's name of what joins the tower to the text side.
        text: the library's name of the text side, where this is not run by itself but in the whole model: `_OWN` if it
            is the same there.
        mark: the token in place of which pictures are put.
        begins: what the names of the whole's tensors begin with.
    """

    whole: str
    joiner: str
    text: str = ""
    mark: str = "<|image_pad|>"
    begins: str = "model."


_OWN = "own"
_PIXTRAL = _Kind("mistral3", "pixtral", _OWN, "[IMG]")
_KINDS = {
    "gemma3": _Kind("gemma3", "gemma3", "gemma3_text", "<start_of_image>"),
    "gemma4": _Kind("gemma4", "gemma4v", "gemma4_text", "<|image|>"),
    "glm4moe": _Kind("glm4v_moe", "glm4v", "glm4v_moe_text", "<|image|>"),
    "llama": _PIXTRAL,
    "llama4": _Kind("llama4", "llama4", "", "<|patch|>", ""),
    "mistral3": _PIXTRAL,
    "mistral4": _PIXTRAL,
    "qwen2vl": _Kind("qwen2_5_vl", "qwen2.5vl_merger", "qwen2_5_vl_text"),
    "qwen35": _Kind("qwen3_5", "qwen3vl_merger"),
    "qwen35moe": _Kind("qwen3_5_moe", "qwen3vl_merger"),
    "qwen3vl": _Kind("qwen3_vl", "qwen3vl_merger", "qwen3_vl_text"),
    "qwen3vlmoe": _Kind("qwen3_vl_moe", "qwen3vl_merger", "qwen3_vl_moe_text"),
}
"""By llama.cpp's name of the language model."""
_MOST_TOKENS, _LEAST_TOKENS = 4096, 8
"""That llama.cpp makes of a picture."""
_IN = "clip.vision."
_ENDS_OF_GEMMA4 = {"boi": "<|image>", "eoi": "<image|>"}


@dataclass(frozen=True, slots=True)
class Projector:
    """What a `mmproj` file adds to a language model.

    Attributes:
        config: of the whole, but for what it says about text.
        text: changes of what it says about text, if the library's whole model runs it.
        preprocessor: as its preprocessor_config.json would be.
        tensors: by the names that a checkpoint has for them.
    """

    config: dict[str, Any]
    text: dict[str, Any]
    preprocessor: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def whole_config(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the whole, of that of the text side."""
        tied = text.get("tie_word_embeddings", False)
        own = dict(text)
        if self.text:
            own |= {name: value for name, value in self.text.items() if name != "rope_parameters"}
            own["rope_parameters"] = {**own.get("rope_parameters", {}), **self.text.get("rope_parameters", {})}
        return {**self.config, "tie_word_embeddings": tied, "text_config": own}

    def whole_tensors(self, text: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        """The tensors of the whole, of those of the text side."""
        begins = "model.language_model." if self.text else "model."
        renamed = {
            f"{begins}{key.removeprefix('model.')}" if key.startswith("model.") else key: entry
            for key, entry in text.items()
        }
        return {key: replace(entry, key=key) for key, entry in renamed.items()} | self.tensors


def beside(path: Path) -> Path | None:
    """The `mmproj` file in the folder of a model: of several, that of most bits that is likely to be the model's."""
    try:
        names = sorted(entry.name for entry in os.scandir(path.parent))
    except OSError:
        return None
    found = [name for name in names if "mmproj" in name.lower() and name.lower().endswith(SUFFIX)]
    if not found:
        return None

    def likely(name: str) -> tuple[int, int]:
        bits = next((at for at, kind in enumerate(("bf16", "f16", "f32", "q8")) if kind in name.lower()), 4)
        alike = [one == other for one, other in zip(_bare(name), _bare(path.name), strict=False)]
        return -(alike.index(False) if False in alike else len(alike)), bits

    return path.parent / min(found, key=likely)


def _bare(name: str) -> str:
    return name.lower().replace("mmproj", "").strip("-_.")


def projector_of(model: GgufFile) -> Projector | None:
    """That of a model; `None` if it reads text only, for a reason that `why_not` says."""
    found = _found(model)
    return found if isinstance(found, Projector) else None


def why_not(model: GgufFile) -> str:
    """Why a model reads text only, completing a sentence; empty if it sees."""
    found = _found(model)
    return found if isinstance(found, str) else ""


def _found(model: GgufFile) -> Projector | str:
    """What sees, or why nothing does."""
    file = beside(model.path) if model.open_file is open_untrusted else None
    if file is None:
        return "there is no mmproj file, the part that sees, beside it"
    try:
        status = file.stat()
    except OSError as error:
        return f"{file.name} beside it cannot be read ({reason(error)})"
    return _looked_at(model.path, model.digest, file, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.lru_cache(maxsize=4)
def _looked_at(path: Path, _digest: str, file: Path, _state: tuple[int, ...]) -> Projector | str:
    """The same of these two files, as they are now."""
    model = read_gguf(path)
    if model.architecture not in _KINDS:
        return f"how {model.architecture} models see is not known to this version of Switchyard in GGUF files"
    kind = _KINDS[model.architecture]
    try:
        read = read_projector(file)
        said = read.metadata
        found = said.get(f"{_IN}projector_type", said.get("clip.projector_type"))
        width = said.get(f"{_IN}projection_dim")
        if str(found) != kind.joiner or str(width) != str(model.value("embedding_length")):  # may be arrays
            return f"{file.name} beside it is the part of another model that sees"
        mark = _token(model, kind.mark)
        if mark is None:
            return f"its vocabulary has no {kind.mark}, which stands for pictures in {kind.whole} models"
        return _read(model, read, kind, mark)
    except EngineError as error:
        return error.message.rstrip(".")


def _read(model: GgufFile, file: GgufFile, kind: _Kind, mark: int) -> Projector:
    said = _Numbers(file)
    vision = _VISION[kind.whole](file, said)
    preprocessor: dict[str, Any] = {name: said.colours(name) for name in ("image_mean", "image_std")}
    config: dict[str, Any] = {"model_type": kind.whole, "vision_config": vision}
    text: dict[str, Any] = {"model_type": kind.text} if kind.text else {}
    if kind.text == _OWN:
        text = {"rope_parameters": {}}
    match kind.whole:
        case "gemma3":
            tokens = model.metadata["tokenizer.ggml.tokens"]
            assert isinstance(tokens, Strings)
            edge = vision["image_size"] // vision["patch_size"] // said("projector.scale_factor", 4)
            config |= {
                "mm_tokens_per_image": edge**2,
                "boi_token_index": mark,
                "eoi_token_index": _token(model, "<end_of_image>") or mark,
                "image_token_index": _token(model, "<image_soft_token>") or len(tokens),
            }
        case "gemma4":
            ends = {f"{name}_token_id": _token(model, token) for name, token in _ENDS_OF_GEMMA4.items()}
            config |= {"image_token_id": mark, **{name: found or mark for name, found in ends.items()}}
        case "llama4":
            config["image_token_index"] = mark
        case "mistral3":
            merge = said("spatial_merge_size", 1)
            config |= {"image_token_index": mark, "spatial_merge_size": merge, "multimodal_projector_bias": False}
        case "glm4v_moe":
            config["image_token_id"] = mark
            text |= _rotated(model)
        case _:
            patch, merge = vision["patch_size"], vision["spatial_merge_size"]
            side = (patch * merge) ** 2
            preprocessor |= {
                "patch_size": patch,
                "merge_size": merge,
                "temporal_patch_size": 2,
                "min_pixels": said("image_min_pixels", _LEAST_TOKENS * side),
                "max_pixels": said("image_max_pixels", _MOST_TOKENS * side),
            }
            config["image_token_id"] = mark
            if text:
                text |= _rotated(model)
    made = _NAMES[kind.whole](file, vision)
    return Projector(config, text, preprocessor, dict(_tensors(file, vision, made, kind.begins)))


def _rotated(model: GgufFile) -> dict[str, Any]:
    sections = model.value("rope.dimension_sections")
    if not (isinstance(sections, np.ndarray) and len(sections) >= 3):
        raise _damaged(model, "does not say how pictures rotate (rope.dimension_sections)")
    return {"rope_parameters": {"mrope_section": [int(each) for each in sections[:3]]}}


class _Numbers:
    """What a file says of its tower."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self._file.metadata.get(f"{_IN}{name}", default)
        if type(value) is not int or not 0 < value < 2**20:
            raise _damaged(self._file, f"says {value} of {name}")
        return value

    def colours(self, name: str) -> list[float]:
        """Of red, green and blue."""
        value = self._file.metadata.get(f"{_IN}{name}")
        if not isinstance(value, np.ndarray) or value.shape != (3,):
            raise _damaged(self._file, f"says no {name}")
        return [float(each) for each in value]


def _of_qwen(_file: GgufFile, said: _Numbers) -> dict[str, Any]:
    return {
        "depth": said("block_count"),
        "hidden_size": said("embedding_length"),
        "intermediate_size": said("feed_forward_length"),
        "num_heads": said("attention.head_count"),
        "out_hidden_size": said("projection_dim"),
        "patch_size": said("patch_size"),
        "spatial_merge_size": said("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "in_channels": 3,
    }


def _qwen2_5_vl(file: GgufFile, said: _Numbers) -> dict[str, Any]:
    made, period = _of_qwen(file, said), said("n_wa_pattern", 8)
    whole = list(range(period - 1, made["depth"], period))
    return made | {"hidden_act": "silu", "window_size": said("window_size", 112), "fullatt_block_indexes": whole}


def _qwen3_vl(file: GgufFile, said: _Numbers) -> dict[str, Any]:
    places = file.tensors.get("v.position_embd.weight")
    if places is None or len(places.shape) != 2:
        raise _damaged(file, "has no embedding of positions")
    deep = file.metadata.get(f"{_IN}is_deepstack_layers")
    found = [at for at, is_deep in enumerate(deep) if is_deep] if isinstance(deep, np.ndarray) else []
    more = {"num_position_embeddings": places.shape[0], "deepstack_visual_indexes": found}
    return _of_qwen(file, said) | {"hidden_act": "gelu_pytorch_tanh", **more}


def _gemma4(file: GgufFile, said: _Numbers) -> dict[str, Any]:
    places = file.tensors.get("v.position_embd.weight")
    if places is None or len(places.shape) != 3:
        raise _damaged(file, "has no embedding of positions")
    heads, width = said("attention.head_count"), said("embedding_length")
    return {
        "model_type": "gemma4_vision",
        "num_hidden_layers": said("block_count"),
        "hidden_size": width,
        "intermediate_size": said("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "patch_size": said("patch_size"),
        "pooling_kernel_size": said("projector.scale_factor", 3),
        "position_embedding_size": places.shape[1],
        "standardize": "v.std_scale" in file.tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in file.tensors,
    }


def _glm4v(file: GgufFile, said: _Numbers) -> dict[str, Any]:
    more = {"image_size": said("image_size"), "attention_bias": "v.blk.0.attn_qkv.bias" in file.tensors}
    return _of_qwen(file, said) | {"hidden_act": "silu", **more}


def _llama4(file: GgufFile, said: _Numbers) -> dict[str, Any]:
    first, second, joiner = (file.tensors.get(f"mm.model.{name}.weight") for name in ("mlp.1", "mlp.2", "fc"))
    if first is None or second is None or joiner is None:
        raise _damaged(file, "lacks what joins it to the text")
    return {
        "num_hidden_layers": said("block_count"),
        "hidden_size": said("embedding_length"),
        "intermediate_size": said("feed_forward_length"),
        "num_attention_heads": said("attention.head_count"),
        "image_size": said("image_size"),
        "patch_size": said("patch_size"),
        "pixel_shuffle_ratio": 1 / said("projector.scale_factor", 2),
        "projector_input_dim": first.shape[0],
        "projector_output_dim": second.shape[0],
        "vision_output_dim": joiner.shape[-1],
    }


def _pixtral(file: GgufFile, said: _Numbers) -> dict[str, Any]:
    heads, width = said("attention.head_count"), said("embedding_length")
    return {
        "model_type": "pixtral",
        "num_hidden_layers": said("block_count"),
        "hidden_size": width,
        "intermediate_size": said("feed_forward_length"),
        "num_attention_heads": heads,
        "head_dim": width // heads,
        "image_size": said("image_size"),
        "patch_size": said("patch_size"),
        "hidden_act": "silu" if file.metadata.get("clip.use_silu") else "gelu",
    }


def _siglip(_file: GgufFile, said: _Numbers) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": said("block_count"),
        "hidden_size": said("embedding_length"),
        "intermediate_size": said("feed_forward_length"),
        "num_attention_heads": said("attention.head_count"),
        "image_size": said("image_size"),
        "patch_size": said("patch_size"),
        "vision_use_head": False,
    }


_VISION = {
    "gemma3": _siglip,
    "gemma4": _gemma4,
    "glm4v_moe": _glm4v,
    "llama4": _llama4,
    "mistral3": _pixtral,
    "qwen2_5_vl": _qwen2_5_vl,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _qwen3_vl),
}
"""The tower's configuration, by the name of the whole."""

_Named = dict[str, tuple[str, ...]]
"""Tensors of a tower: how each is made, and of which in the file."""
_BOTH = ("weight", "bias")


def _pairs(names: Mapping[str, str], kinds: tuple[str, ...] = _BOTH) -> _Named:
    return {f"{ours}.{kind}": ("", f"{its}.{kind}") for ours, its in names.items() for kind in kinds}


def _qwen2_5_names(_file: GgufFile, vision: Mapping[str, Any]) -> _Named:
    made: _Named = {"visual.patch_embed.proj.weight": ("frames", "v.patch_embd.weight", "v.patch_embd.weight.1")}
    made |= {"visual.merger.ln_q.weight": ("", "v.post_ln.weight")}
    made |= _pairs({"visual.merger.mlp.0": "mm.0", "visual.merger.mlp.2": "mm.2"})
    for number in range(vision["depth"]):
        ours, its = f"visual.blocks.{number}", f"v.blk.{number}"
        made |= _pairs({f"{ours}.norm1": f"{its}.ln1", f"{ours}.norm2": f"{its}.ln2"}, ("weight",))
        made |= _pairs({f"{ours}.mlp.{part}_proj": f"{its}.ffn_{part}" for part in ("gate", "up", "down")})
        made |= _pairs({f"{ours}.attn.proj": f"{its}.attn_out"})
        for kind, how in (("weight", "joined"), ("bias", "joined_numbers")):
            made[f"{ours}.attn.qkv.{kind}"] = (how, *(f"{its}.attn_{each}.{kind}" for each in "qkv"))
    return made


def _qwen3_names(_file: GgufFile, vision: Mapping[str, Any]) -> _Named:
    made: _Named = {
        "visual.patch_embed.proj.weight": ("frames", "v.patch_embd.weight", "v.patch_embd.weight.1"),
        "visual.patch_embed.proj.bias": ("", "v.patch_embd.bias"),
        "visual.pos_embed.weight": ("", "v.position_embd.weight"),
    }
    made |= _pairs(
        {"visual.merger.norm": "v.post_ln", "visual.merger.linear_fc1": "mm.0", "visual.merger.linear_fc2": "mm.2"}
    )
    layer = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    layer |= {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}
    for number in range(vision["depth"]):
        made |= _pairs({f"visual.blocks.{number}.{ours}": f"v.blk.{number}.{its}" for ours, its in layer.items()})
    parts = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
    for at, number in enumerate(vision["deepstack_visual_indexes"]):
        begin = f"visual.deepstack_merger_list.{at}"
        made |= _pairs({f"{begin}.{ours}": f"v.deepstack.{number}.{its}" for ours, its in parts.items()})
    return made


def _siglip_names(file: GgufFile, vision: Mapping[str, Any]) -> _Named:
    tower = "vision_tower"
    made: _Named = {
        f"{tower}.embeddings.position_embedding.weight": ("", "v.position_embd.weight"),
        "multi_modal_projector.mm_input_projection_weight": ("", "mm.input_projection.weight"),
        "multi_modal_projector.mm_soft_emb_norm.weight": ("lowered", "mm.soft_emb_norm.weight"),
    }
    made |= _pairs({f"{tower}.embeddings.patch_embedding": "v.patch_embd", f"{tower}.post_layernorm": "v.post_ln"})
    # Older files have the two matrices of a layer's MLP under each other's names.
    first = file.tensors.get("v.blk.0.ffn_up.weight")
    up, down = "ffn_up", "ffn_down"
    swapped = vision["hidden_size"], vision["intermediate_size"]
    if first is not None and first.shape == swapped != swapped[::-1]:
        up, down = down, up
    layer = {"layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": up, "mlp.fc2": down}
    layer |= {f"self_attn.{each}_proj": f"attn_{each}" for each in ("q", "k", "v", "out")}
    for number in range(vision["num_hidden_layers"]):
        made |= _pairs(
            {f"{tower}.encoder.layers.{number}.{ours}": f"v.blk.{number}.{its}" for ours, its in layer.items()}
        )
    return made


def _gemma4_names(_file: GgufFile, vision: Mapping[str, Any]) -> _Named:
    tower = "vision_tower"
    made: _Named = {
        f"{tower}.patch_embedder.input_proj.weight": ("colours_last", "v.patch_embd.weight"),
        f"{tower}.patch_embedder.position_embedding_table": ("", "v.position_embd.weight"),
        "embed_vision.embedding_projection.weight": ("", "mm.input_projection.weight"),
    }
    if vision["standardize"]:
        made |= {f"{tower}.std_{each}": ("", f"v.std_{each}") for each in ("scale", "bias")}
    norms = {
        "input_layernorm": "ln1",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm",
        **{f"self_attn.{each}_norm": f"attn_{each}_norm" for each in "qk"},
    }
    matrices = {f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"} | {"self_attn.o_proj": "attn_out"}
    matrices |= {f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")}
    for number in range(vision["num_hidden_layers"]):
        ours, its = f"{tower}.encoder.layers.{number}", f"v.blk.{number}"
        made |= _pairs({f"{ours}.{norm}": f"{its}.{name}" for norm, name in norms.items()}, ("weight",))
        made |= _pairs({f"{ours}.{matrix}.linear": f"{its}.{name}" for matrix, name in matrices.items()}, ("weight",))
        if vision["use_clipped_linears"]:
            made |= {
                f"{ours}.{matrix}.{way}put_{end}": ("scalar", f"{its}.{name}.{way}put_{end}")
                for matrix, name in matrices.items()
                for way in ("in", "out")
                for end in ("min", "max")
            }
    return made


def _glm4v_names(_file: GgufFile, vision: Mapping[str, Any]) -> _Named:
    made: _Named = {
        "visual.patch_embed.proj.weight": ("frames", "v.patch_embd.weight", "v.patch_embd.weight.1"),
        "visual.patch_embed.proj.bias": ("", "v.patch_embd.bias"),
    }
    made |= _pairs({"visual.downsample": "mm.patch_merger", "visual.merger.post_projection_norm": "mm.post_norm"})
    beside = {f"merger.{part}_proj": f"mm.{part}" for part in ("gate", "up", "down")}
    beside |= {"merger.proj": "mm.model.fc", "embeddings.position_embedding": "v.position_embd"}
    beside |= {"post_conv_layernorm": "v.norm_embd", "post_layernorm": "v.post_ln"}
    made |= _pairs({f"visual.{ours}": its for ours, its in beside.items()}, ("weight",))
    layer = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    layer |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    for number in range(vision["depth"]):
        ours, its = f"visual.blocks.{number}", f"v.blk.{number}"
        made |= _pairs({f"{ours}.{one}": f"{its}.{other}" for one, other in layer.items()}, ("weight",))
        if vision["attention_bias"]:
            made |= _pairs({f"{ours}.attn.qkv": f"{its}.attn_qkv"}, ("bias",))
    return made


def _llama4_names(file: GgufFile, vision: Mapping[str, Any]) -> _Named:
    tower = "vision_model"
    made: _Named = {
        f"{tower}.class_embedding": ("", "v.class_embd"),
        f"{tower}.positional_embedding_vlm": ("", "v.position_embd.weight"),
    }
    beside = {
        f"{tower}.patch_embedding.linear": "v.patch_embd",
        f"{tower}.vision_adapter.mlp.fc1": "mm.model.mlp.1",
        f"{tower}.vision_adapter.mlp.fc2": "mm.model.mlp.2",
        "multi_modal_projector.linear_1": "mm.model.fc",
    }
    made |= _pairs(beside, ("weight",))
    made |= _pairs({f"{tower}.layernorm_pre": "v.pre_ln", f"{tower}.layernorm_post": "v.post_ln"})
    # Newer converters take the second norm for another of Gemma 4's, which has the same name in the library.
    second = "ln2" if "v.blk.0.ln2.weight" in file.tensors else "attn_post_norm"
    layer = {"input_layernorm": "ln1", "post_attention_layernorm": second, "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
    layer |= {f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"} | {"self_attn.o_proj": "attn_out"}
    for number in range(vision["num_hidden_layers"]):
        ours, its = f"{tower}.model.layers.{number}", f"v.blk.{number}"
        made |= _pairs({f"{ours}.{one}": f"{its}.{other}" for one, other in layer.items()})
    return made


def _pixtral_names(_file: GgufFile, vision: Mapping[str, Any]) -> _Named:
    tower, joiner = "vision_tower", "multi_modal_projector"
    beside = {
        f"{tower}.patch_conv": "v.patch_embd",
        f"{tower}.ln_pre": "v.pre_ln",
        f"{joiner}.norm": "mm.input_norm",
        f"{joiner}.patch_merger.merging_layer": "mm.patch_merger",
        f"{joiner}.linear_1": "mm.1",
        f"{joiner}.linear_2": "mm.2",
    }
    made = _pairs(beside, ("weight",))
    layer = {"attention_norm": "ln1", "ffn_norm": "ln2", "attention.v_proj": "attn_v", "attention.o_proj": "attn_out"}
    layer |= {f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    for number in range(vision["num_hidden_layers"]):
        ours, its = f"{tower}.transformer.layers.{number}", f"v.blk.{number}"
        made |= _pairs({f"{ours}.{one}": f"{its}.{other}" for one, other in layer.items()}, ("weight",))
        for each in "qk":
            made[f"{ours}.attention.{each}_proj.weight"] = ("rotary_q", f"{its}.attn_{each}.weight")
    return made


_NAMES = {
    "gemma3": _siglip_names,
    "gemma4": _gemma4_names,
    "glm4v_moe": _glm4v_names,
    "llama4": _llama4_names,
    "mistral3": _pixtral_names,
    "qwen2_5_vl": _qwen2_5_names,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _qwen3_names),
}


def _tensors(file: GgufFile, vision: Mapping[str, Any], made: _Named, begins: str) -> Iterator[tuple[str, TensorEntry]]:
    for name, (how, *sources) in made.items():
        missing = next((source for source in sources if source not in file.tensors), None)
        if missing is not None:
            raise _damaged(file, f"lacks {missing}")
        key = f"{begins}{name}"
        yield key, replace(ARRANGEMENTS[how]([file.tensors[source] for source in sources], vision), key=key)


def _token(model: GgufFile, text: str) -> int | None:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Strings):
        return None
    try:
        return next((at for at, token in enumerate(tokens) if token == text), None)
    except UnicodeDecodeError:
        return None


def _damaged(file: GgufFile, what: str) -> EngineError:
    return EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{file.path} {what}: get another version of the file.")
