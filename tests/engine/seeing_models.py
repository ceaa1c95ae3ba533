"""Tiny random models that see, with a tokenizer and a chat template that know pictures, and drawn pictures."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from engine.checkpoint.gguf.file import Strings, read_gguf
from engine.common.chat import ChatMessage, Picture
from tests.engine.tiny_families import model_class, output_embeddings, tiny_checkpoint
from tests.tiny_gguf import dequantised, write_gguf

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|picture_begin|><|image|><|picture_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|picture_begin|>", "<|image|>", "<|picture_end|>")
_STEP_MARKS = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
_OTHERS = (
    *("<|video|>", "<|sound|>", "[IMG_BREAK]", "[IMG_END]"),
    *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *_STEP_MARKS,
    *("]<]start of image[>[", "]<]end of image[>[", "<img>", "</img>"),
)
_WRITE_ONE = frozenset(
    (
        *("gemma4", "internvl", "llama4", "minimax_m3_vl", "mistral3", "mistral_large4", "muse_spark"),
        *("nemotron_h_omni", "step3p7"),
    )
)
"""Whose templates write one token for a picture."""
_FIRST = 320


_QWEN = {"size": {"shortest_edge": 64, "longest_edge": 64 * 40}, "temporal_patch_size": 2}
_PREPARED: dict[str, dict[str, Any]] = {
    "aria": {"max_image_size": 490},
    "deepseek_ocr2": {"size": {"height": 256, "width": 256}, "tile_size": 192},
    "ernie4_5_vl_moe": {**_QWEN, "temporal_patch_size": 1},
    "gemma3": {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    "gemma4": {"image_processor": {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}},
    "glm4v_moe": _QWEN,
    "glm46v": _QWEN,
    **{key: {"size": {"height": 8, "width": 8}} for key in ("inkling2", "inkling2_loop", "inkling_mm_model")},
    "internvl": {"size": {"height": 16, "width": 16}, "max_patches": 6},
    "kimi_k25": {"size": {"max_height": 8, "max_width": 8}, "max_patches": 40, "patch_size": 4, "merge_size": 2},
    "llama4": {"max_patches": 6},
    "minimax_m3_vl": {**_QWEN, "size": [672, 672], "min_pixels": 64, "max_pixels": 64 * 40},
    "dots3_note": {**_QWEN, "temporal_patch_size": 1},
    "glm5_next": {"patch_size": 4, "min_image_tokens": 2, "max_image_tokens": 20},
    "hy_v4_vl": {**_QWEN, "patch_size": 4, "temporal_patch_size": 1},
    **{key: {"size": {"longest_edge": 32}, "patch_size": 4} for key in ("mistral3", "mistral_large4")},
    "muse_spark": {"patch_size": 4, "max_image_tokens": 20},
    "nemotron_h_omni": {"patch_size": 4, "min_num_patches": 8, "max_num_patches": 80},
    "qwen3_omni_moe_thinker": _QWEN,
    "qwen4_exp": _QWEN,
    "step3p7": {"patch_size": 16},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
}
GEMMA4_TOWER = {
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
    if family in ("aria", "gemma3", "llama4", "minimax_m3_vl", "mistral3", "mistral_large4"):
        tokens = {"image_token_index": _FIRST + (7 if family == "llama4" else 1)}
    if family == "gemma3":
        tokens |= {"boi_token_index": _FIRST, "eoi_token_index": _FIRST + 2}
    elif family == "gemma4":
        tokens |= {"boi_token_id": _FIRST, "eoi_token_id": _FIRST + 2, "audio_token_id": _FIRST + 4}
        more = {"vision_config": GEMMA4_TOWER, **more}
    elif family == "aria":
        tower = {"image_size": 490, "patch_size": 98}
        more = {"vision_config": tower, "projector_patch_to_query_dict": {"25": 4}, **more}
    elif family == "inkling_mm_model":
        more = {"vision_config": {"patch_size": 8, "n_layers": 5}, **more}
    elif family == "step3p7":
        more = {"vision_config": {"image_size": 32}, **more}
    folder = tiny_checkpoint(family, folder, prepare=_with_more_tokens, **tokens, **more)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    while len(tokenizer) < _FIRST:
        tokenizer.add_tokens([f"<filler {len(tokenizer)}>"])
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, *_OTHERS]})
    assert tokenizer.convert_tokens_to_ids([*MARKS, "<|patch|>"]) == [_FIRST, _FIRST + 1, _FIRST + 2, _FIRST + 7]
    tokenizer.chat_template = _template(family)
    tokenizer.save_pretrained(folder)
    name = "processor_config.json" if family == "gemma4" else "preprocessor_config.json"
    (folder / name).write_text(json.dumps(_PREPARED[family]))
    return folder


def _with_more_tokens(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        text = model if model.get_output_embeddings() is not None else model.language_model
        text.resize_token_embeddings(_FIRST + 24, mean_resizing=False)
        output_embeddings(model).weight.data[_FIRST:] *= 0.01  # they are hardly ever an answer


def _template(family: str) -> str:
    written = {"gemma3": MARKS[0]}.get(family, MARKS[1] if family in _WRITE_ONE else "".join(MARKS))
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


_QWEN_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_LLAMA_MARKS = ("<|image_start|>", "<|patch|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
_GLM_MARKS = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
_IN_GGUF = {
    "deepseek2": (("<|media_begin|>", "<|media_pad|>", "<|media_end|>"), ""),
    "dots3note": (("<|img|>", "<|imgpad|>", "<|endofimg|>"), ""),
    "gemma3": (("<start_of_image>", "<end_of_image>"), "<start_of_image>"),
    "gemma4": (("<|image>", "<|image|>", "<image|>"), "<|image|>"),
    **dict.fromkeys(("glm4", "glm4moe", "glm5-next"), (_GLM_MARKS, "")),
    "llama4": (("<|image|>", *_LLAMA_MARKS), "<|image|>"),
    "minimax-m3": (("]<]image[>[", "]<]start of image[>[", "]<]end of image[>["), "]<]image[>["),
    "mistral3": (("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]"),
    "step35": (("<im_patch>", *_STEP_MARKS), "<im_patch>"),
}
"""Tokens of pictures, and what chat templates write if that is not all of them."""


def with_picture_tokens(file: Path, target: Path) -> Path:
    """A GGUF model whose vocabulary and chat template know pictures."""
    read = read_gguf(file)
    tokens = [*read.metadata["tokenizer.ggml.tokens"]]  # type: ignore[misc]
    said: Any = read.metadata["tokenizer.ggml.token_type"]
    marks, written = _IN_GGUF.get(read.architecture, (_QWEN_MARKS, ""))
    count = len(marks)
    kinds = [*(int(kind) for kind in said[:-count]), *([3] * count)]
    merges = [*read.metadata["tokenizer.ggml.merges"]]  # type: ignore[misc]
    gone = set(tokens[-count:])
    changes: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*tokens[:-count], *marks],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [each for each in merges if each.replace(" ", "") not in gone],
        "tokenizer.chat_template": TEMPLATE.replace("".join(MARKS), written or "".join(marks)),
    }
    tensors = {name: dequantised(entry) for name, entry in read.tensors.items()}
    if read.architecture == "glm4moe":  # GLM-4.5V's, which has no norm of queries and keys
        changes["glm4moe.rope.dimension_sections"] = [2, 1, 1, 0]
        tensors = {
            name: each for name, each in tensors.items() if not name.endswith(("_q_norm.weight", "_k_norm.weight"))
        }
    elif read.architecture == "glm4":  # GLM-4.1V's, whose queries and keys llama.cpp's converter writes in halves
        changes["glm4.rope.dimension_sections"] = [2, 1, 1, 0]
        turned = int(read.metadata["glm4.rope.dimension_count"])  # type: ignore[call-overload]
        order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, 2 * turned)]
        tensors = {
            name: each.reshape(-1, 2 * turned, *each.shape[1:])[:, order].reshape(each.shape)
            if ".attn_q." in name or ".attn_k." in name
            else each
            for name, each in tensors.items()
        }

    def keys(writer: GGUFWriter) -> None:
        for key, value in {**read.metadata, **changes}.items():
            if key != "general.architecture":
                plain = value.tolist() if isinstance(value, np.ndarray) else value
                plain = list(plain) if isinstance(plain, Strings) else plain
                is_long = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.max() >= 2**31
                inner = GGUFValueType.INT64 if is_long else None
                writer.add_key_value(key, plain, GGUFValueType.get_type(plain), inner)

    return write_gguf(target, tensors, architecture=read.architecture, keys=keys)
