"""Tiny random models that see, with a tokenizer and a chat template that know pictures, and drawn pictures."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer

from engine.common.chat import ChatMessage, Picture
from tests.engine.tiny_families import model_class, tiny_checkpoint

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
    "gemma3": {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "gemma4": {"image_processor": {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}},
    "glm4v_moe": _QWEN,
    "glm46v": _QWEN,
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
    from transformers import AutoConfig

    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype).eval()
