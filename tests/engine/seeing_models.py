"""Tiny random models that see, with a tokenizer and a chat template that know pictures, and drawn pictures."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoTokenizer

from engine.checkpoint.gguf.file import Strings, read_gguf
from engine.common.chat import ChatMessage, Picture
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config
from tests.tiny_gguf import dequantised, write_gguf

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|picture_begin|><|image|><|picture_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|picture_begin|>", "<|image|>", "<|picture_end|>")
_FIRST = 320


_QWEN = {"size": {"shortest_edge": 64, "longest_edge": 64 * 40}, "temporal_patch_size": 2}
_PREPARED: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe": {**_QWEN, "temporal_patch_size": 1},
    "gemma3": {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "gemma4": {"image_processor": {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}},
    "glm4v_moe": _QWEN,
    "glm46v": _QWEN,
    "kimi_k25": {"size": {"max_height": 8, "max_width": 8}, "max_patches": 40, "patch_size": 4, "merge_size": 2},
    "mistral3": {"size": {"longest_edge": 32}, "patch_size": 4},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
}
_GEMMA4_TOWER = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 64,
}
SEEING = tuple(_PREPARED)


def seeing_checkpoint(family: str, folder: Path, **more: Any) -> Path:
    """Writes a tiny model of the family that sees."""
    kinds = ("vision_start", "image", "vision_end", "video")
    tokens = {f"{kind}_token_id": _FIRST + at for at, kind in enumerate(kinds)}
    if family == "ernie4_5_vl_moe":
        tokens = {name.replace("vision_", "image_"): at for name, at in tokens.items()}
    if family in ("gemma3", "mistral3"):
        tokens = {"image_token_index": _FIRST + 1}
    if family == "gemma3":
        tokens |= {"boi_token_index": _FIRST, "eoi_token_index": _FIRST + 2}
    elif family == "gemma4":
        tokens |= {"boi_token_id": _FIRST, "eoi_token_id": _FIRST + 2, "audio_token_id": _FIRST + 4}
        more = {"vision_config": _GEMMA4_TOWER, **more}
    folder = tiny_checkpoint(family, folder, prepare=_with_more_tokens, **tokens, **more)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    while len(tokenizer) < _FIRST:
        tokenizer.add_tokens([f"<filler {len(tokenizer)}>"])
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*MARKS, "<|video|>", "<|sound|>", "[IMG_BREAK]", "[IMG_END]"]}
    )
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == [_FIRST, _FIRST + 1, _FIRST + 2]
    tokenizer.chat_template = _template(family)
    tokenizer.save_pretrained(folder)
    name = "processor_config.json" if family == "gemma4" else "preprocessor_config.json"
    (folder / name).write_text(json.dumps(_PREPARED[family]))
    return folder


def _with_more_tokens(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.resize_token_embeddings(_FIRST + 8, mean_resizing=False)


def _template(family: str) -> str:
    written = {"gemma3": MARKS[0]}.get(family, MARKS[1] if family in ("gemma4", "mistral3") else "".join(MARKS))
    return TEMPLATE.replace("".join(MARKS), written)


def drawn(width: int, height: int, seed: int = 0) -> Picture:
    """A picture of coloured squares."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((width, height)).save(file, "PNG")
    return Picture("image/png", base64.b64encode(file.getvalue()).decode())


def turn(*parts: str | Picture) -> ChatMessage:
    """A user's message of text and pictures, in this order."""
    listed = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in parts
    ]
    text = "".join(part for part in parts if isinstance(part, str))
    return ChatMessage("user", text, parts=json.dumps(listed))


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The library's own model of a checkpoint, whole."""
    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype).eval()


def with_picture_tokens(file: Path, target: Path) -> Path:
    """A GGUF model whose vocabulary and chat template know pictures."""
    read = read_gguf(file)
    tokens = [*read.metadata["tokenizer.ggml.tokens"]]  # type: ignore[misc]
    said: Any = read.metadata["tokenizer.ggml.token_type"]
    kinds = [*(int(kind) for kind in said[:-3]), 3, 3, 3]
    is_gemma = read.architecture == "gemma3"
    marks = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    if is_gemma:
        marks = ("<start_of_image>", "<end_of_image>", "<mask>")
    merges = [*read.metadata["tokenizer.ggml.merges"]]  # type: ignore[misc]
    gone = set(tokens[-3:])
    changes: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*tokens[:-3], *marks],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [each for each in merges if each.replace(" ", "") not in gone],
        "tokenizer.chat_template": TEMPLATE.replace("".join(MARKS), marks[0] if is_gemma else "".join(marks)),
    }

    def keys(writer: GGUFWriter) -> None:
        for key, value in {**read.metadata, **changes}.items():
            if key != "general.architecture":
                plain = value.tolist() if isinstance(value, np.ndarray) else value
                plain = list(plain) if isinstance(plain, Strings) else plain
                writer.add_key_value(key, plain, GGUFValueType.get_type(plain))

    tensors = {name: dequantised(entry) for name, entry in read.tensors.items()}
    return write_gguf(target, tensors, architecture=read.architecture, keys=keys)


def drawn_tower(family: str, width: int) -> Any:
    """The library's model of a family with a random tower whose rows are so wide."""
    config = tiny_config(family)
    config.vision_config.out_hidden_size = config.text_config.hidden_size = width
    config.vision_config.vision_use_head = False
    if hasattr(config.vision_config, "depth"):
        config.vision_config.depth = 2
    if family == "qwen2_5_vl":
        config.vision_config.fullatt_block_indexes = [1]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModel.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if "language_model" not in name:
                parameter.data = torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1)
    return model


_OF_LAYERS = {
    "gemma3": {"layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
    | {f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "out")},
    "qwen2_5_vl": {"norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out"}
    | {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "qwen3_vl": {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    | {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
}
_BESIDE_LAYERS = {
    "gemma3": {
        "vision_tower.embeddings.patch_embedding": "v.patch_embd",
        "vision_tower.embeddings.position_embedding": "v.position_embd",
        "vision_tower.post_layernorm": "v.post_ln",
    },
    "qwen2_5_vl": {"visual.merger.ln_q": "v.post_ln", "visual.merger.mlp.0": "mm.0", "visual.merger.mlp.2": "mm.2"},
    "qwen3_vl": {
        "visual.patch_embed.proj": "v.patch_embd",
        "visual.pos_embed": "v.position_embd",
        "visual.merger.norm": "v.post_ln",
        "visual.merger.linear_fc1": "mm.0",
        "visual.merger.linear_fc2": "mm.2",
    },
}


def write_mmproj(file: Path, family: str, model: Any, width: int) -> Path:
    """As llama.cpp's converter writes a model's tower and what joins it to the text."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    config, kind = model.config.vision_config, "qwen3_vl" if family.startswith("qwen3") else family
    layers = config.num_hidden_layers if kind == "gemma3" else config.depth
    named = dict(_BESIDE_LAYERS[kind])
    for at in range(layers):
        begin = f"vision_tower.encoder.layers.{at}" if kind == "gemma3" else f"visual.blocks.{at}"
        named |= {f"{begin}.{theirs}": f"v.blk.{at}.{name}" for theirs, name in _OF_LAYERS[kind].items()}
    deep = getattr(config, "deepstack_visual_indexes", None) or [] if family == "qwen3_vl" else []
    for at, layer in enumerate(deep):
        for theirs, name in {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}.items():
            named[f"visual.deepstack_merger_list.{at}.{theirs}"] = f"v.deepstack.{layer}.{name}"
    tensors = {
        f"{name}.{part}": state[f"{theirs}.{part}"]
        for theirs, name in named.items()
        for part in ("weight", "bias")
        if f"{theirs}.{part}" in state
    }
    if kind == "gemma3":
        tensors["mm.input_projection.weight"] = state["multi_modal_projector.mm_input_projection_weight"]
        tensors["mm.soft_emb_norm.weight"] = state["multi_modal_projector.mm_soft_emb_norm.weight"] + 1
    else:
        patches = state["visual.patch_embed.proj.weight"]
        tensors |= {"v.patch_embd.weight": patches[:, :, 0], "v.patch_embd.weight.1": patches[:, :, 1]}
    if kind == "qwen2_5_vl":
        for at in range(layers):
            for part in ("weight", "bias"):
                thirds = np.split(state[f"visual.blocks.{at}.attn.qkv.{part}"], 3)
                tensors |= {f"v.blk.{at}.attn_{one}.{part}": each for one, each in zip("qkv", thirds, strict=True)}

    def keys(writer: GGUFWriter) -> None:
        writer.add_type("mmproj")
        joiners = {"gemma3": "gemma3", "qwen2_5_vl": "qwen2.5vl_merger"}
        writer.add_string("clip.projector_type", joiners.get(kind, "qwen3vl_merger"))
        writer.add_bool("clip.has_vision_encoder", True)
        numbers = {
            "projection_dim": width,
            "block_count": layers,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": getattr(config, "num_heads", None) or config.num_attention_heads,
            "patch_size": config.patch_size,
        }
        if kind == "gemma3":
            numbers |= {"image_size": config.image_size, "projector.scale_factor": 2}
        else:
            numbers |= {"spatial_merge_size": 2, "image_min_pixels": 64, "image_max_pixels": 64 * 40}
        if kind == "qwen2_5_vl":
            numbers |= {"n_wa_pattern": 2, "window_size": config.window_size}
        for name, value in numbers.items():
            writer.add_uint32(f"clip.vision.{name}", value)
        if kind == "qwen3_vl":
            writer.add_array("clip.vision.is_deepstack_layers", [at in deep for at in range(layers)])
        for name in ("image_mean", "image_std"):
            writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])

    return write_gguf(file, tensors, architecture="clip", keys=keys)
