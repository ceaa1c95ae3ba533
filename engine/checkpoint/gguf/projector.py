"""The part of a GGUF model that sees: the `mmproj` file beside it, as llama.cpp's converter writes it.

Its tower becomes that of the library's model: a configuration of the whole, and tensors by the names that checkpoints
have for them.  What belongs to another model is refused in a sentence when a picture is sent, and text goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.gguf.arrangements import ARRANGEMENTS
from engine.checkpoint.gguf.file import GgufFile, Strings, read_projector
from engine.checkpoint.gguf.names import SUFFIX
from engine.checkpoint.headers import TensorEntry
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import open_foreign

_KINDS = {
    "qwen35": ("qwen3_5", "qwen3vl_merger"),
    "qwen35moe": ("qwen3_5_moe", "qwen3vl_merger"),
}
"""llama.cpp's name of a language model -> the library's of the whole, and llama.cpp's of what joins the tower to it."""
_PLACEHOLDER = "<|image_pad|>"
_MOST_TOKENS, _LEAST_TOKENS = 4096, 8
"""That llama.cpp makes of a picture."""
_IN = "clip.vision."


@dataclass(frozen=True, slots=True)
class Projector:
    """What a `mmproj` file adds to a language model.

    Attributes:
        config: of the whole, but for what it says about text.
        preprocessor: as its preprocessor_config.json would be.
        tensors: by the names that a checkpoint has for them.
    """

    config: dict[str, Any]
    preprocessor: dict[str, Any]
    tensors: dict[str, TensorEntry]


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
    file = beside(model.path) if model.open_file is open_foreign else None
    if file is None:
        return "there is no mmproj file, the part that sees, beside it"
    if model.architecture not in _KINDS:
        return f"how {model.architecture} models see is not known to this version of Switchyard in GGUF files"
    whole, kind = _KINDS[model.architecture]
    try:
        read = read_projector(file)
        said = read.metadata
        found = said.get(f"{_IN}projector_type", said.get("clip.projector_type"))
        if found != kind or said.get(f"{_IN}projection_dim") != model.value("embedding_length"):
            return f"{file.name} beside it is the part of another model that sees"
        if _token(model, _PLACEHOLDER) is None:
            return f"its vocabulary has no {_PLACEHOLDER}, which stands for pictures in {whole} models"
        return _read(model, read)
    except EngineError as error:
        return error.message.rstrip(".")


def _read(model: GgufFile, file: GgufFile) -> Projector:
    whole, _kind = _KINDS[model.architecture]

    def number(name: str, default: int | None = None) -> int:
        value = file.metadata.get(f"{_IN}{name}", default)
        if type(value) is not int or not 0 < value < 2**20:
            raise _damaged(file, f"says {value} of {name}")
        return value

    patch, merge = number("patch_size"), number("spatial_merge_size", 2)
    places = file.tensors.get("v.position_embd.weight")
    if places is None or len(places.shape) != 2:
        raise _damaged(file, "has no embedding of positions")
    vision = {
        "model_type": f"{whole}_vision",
        "depth": number("block_count"),
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_heads": number("attention.head_count"),
        "out_hidden_size": number("projection_dim"),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
        "num_position_embeddings": places.shape[0],
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }
    side = (patch * merge) ** 2
    preprocessor = {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 2,
        "min_pixels": number("image_min_pixels", _LEAST_TOKENS * side),
        "max_pixels": number("image_max_pixels", _MOST_TOKENS * side),
        **{name: _numbers(file, name) for name in ("image_mean", "image_std")},
    }
    return Projector(
        {"model_type": whole, "vision_config": vision, "image_token_id": _token(model, _PLACEHOLDER)},
        preprocessor,
        dict(_tensors(file, vision)),
    )


def _tensors(file: GgufFile, vision: Mapping[str, Any]) -> Iterator[tuple[str, TensorEntry]]:
    """As Qwen's towers have them."""
    made = {
        "patch_embed.proj.weight": ("frames", "v.patch_embd.weight", "v.patch_embd.weight.1"),
        "patch_embed.proj.bias": ("", "v.patch_embd.bias"),
        "pos_embed.weight": ("", "v.position_embd.weight"),
    }
    parts = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    made |= {f"merger.{ours}.{kind}": ("", f"{its}.{kind}") for ours, its in parts.items() for kind in _BOTH}
    layer = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out"}
    layer |= {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}
    for number in range(vision["depth"]):
        made |= {
            f"blocks.{number}.{ours}.{kind}": ("", f"v.blk.{number}.{its}.{kind}")
            for ours, its in layer.items()
            for kind in _BOTH
        }
    for name, (how, *sources) in made.items():
        missing = next((source for source in sources if source not in file.tensors), None)
        if missing is not None:
            raise _damaged(file, f"lacks {missing}")
        key = f"model.visual.{name}"
        yield key, replace(ARRANGEMENTS[how]([file.tensors[source] for source in sources], vision), key=key)


_BOTH = ("weight", "bias")


def _token(model: GgufFile, text: str) -> int | None:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Strings):
        return None
    try:
        return next((at for at, token in enumerate(tokens) if token == text), None)
    except UnicodeDecodeError:
        return None


def _numbers(file: GgufFile, name: str) -> list[float]:
    value = file.metadata.get(f"{_IN}{name}")
    if not isinstance(value, np.ndarray) or value.shape != (3,):
        raise _damaged(file, f"says no {name}")
    return [float(each) for each in value]


def _damaged(file: GgufFile, what: str) -> EngineError:
    return EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{file.path} {what}: get another version of the file.")
