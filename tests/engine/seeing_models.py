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
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|picture_begin|><|image|><|picture_end|>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|picture_begin|>", "<|image|>", "<|picture_end|>")
_FIRST = 320


_QWEN = {"size": {"shortest_edge": 64, "longest_edge": 64 * 40}, "patch_size": 4, "merge_size": 2}
_PREPARED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**_QWEN, "temporal_patch_size": 2},
    "qwen3_vl": {**_QWEN, "temporal_patch_size": 2},
    "qwen3_vl_moe": {**_QWEN, "temporal_patch_size": 2},
    "qwen3_5": {**_QWEN, "temporal_patch_size": 2},
    "qwen3_5_moe": {**_QWEN, "temporal_patch_size": 2},
}
SEEING = tuple(_PREPARED)


def seeing_checkpoint(family: str, folder: Path, **more: Any) -> Path:
    """Writes a tiny model of the family that sees."""
    tokens = {f"{kind}_token_id": _FIRST + at for at, kind in enumerate(("vision_start", "image", "vision_end", "video"))}
    folder = tiny_checkpoint(family, folder, prepare=_with_more_tokens, **tokens, **more)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    while len(tokenizer) < _FIRST:
        tokenizer.add_tokens([f"<filler {len(tokenizer)}>"])
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<|video|>"]})
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == [_FIRST, _FIRST + 1, _FIRST + 2]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPARED[family]))
    return folder


def _with_more_tokens(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.resize_token_embeddings(_FIRST + 8, mean_resizing=False)


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
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": part.url}}
        for part in parts
    ]
    text = "".join(part for part in parts if isinstance(part, str))
    return ChatMessage("user", text, parts=json.dumps(listed))


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The library's own model of a checkpoint, whole."""
    from transformers import AutoConfig

    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype).eval()
