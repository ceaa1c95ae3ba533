"""Whether a checkpoint sees, and how many tokens a picture costs, from its configuration and headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import MAX_CONFIG_BYTES, read_config, read_json
from engine.checkpoint.gguf import gguf_at
from engine.common.errors import EngineError, ErrorCode
from engine.families.pictures import SIGHTS, Grid, Sizes

USUAL_PIXELS = 1024
"""Of the sides of the picture that predictions are for."""
_FILES = ("preprocessor_config.json", "processor_config.json")
_TOWER = re.compile(
    r"(^|\.)(visual|vision|vision_tower|vision_model|vision_encoder|vision_embedder|vit|sam_model|qwen2_model)\."
)


def is_of_tower(key: str) -> bool:
    return _TOWER.search(key) is not None


def seeing_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of what sees and writes text: a part of it, where a model speaks, too."""
    part = config.get("thinker_config")
    return {"model_type": f"{config['model_type']}_thinker", **part} if isinstance(part, dict) else config


def why_blind(config: Mapping[str, Any], keys: Iterable[str]) -> str:
    """Why a model with this configuration and these tensors reads text only, ending a sentence; empty if it sees."""
    config = seeing_part(config)
    if not isinstance(config.get("vision_config"), dict):
        return "it was made for text"
    if config["model_type"] not in SIGHTS:
        return f"how {config['model_type']} models see is not known to this version of Switchyard"
    if not any(map(is_of_tower, keys)):
        return "this copy of it lacks the weights that see"
    return ""


def why_gguf_is_blind(directory: Path) -> str:
    """The same of a GGUF file; empty for a checkpoint of another kind."""
    gguf = gguf_at(directory)
    if gguf is None:
        return ""
    from engine.checkpoint.gguf.file import read_gguf
    from engine.checkpoint.gguf.projector import why_not

    return why_not(read_gguf(gguf))


def tower_key(directory: Path) -> str:
    """What tells that which sees in a model's folder from any other: how it prepares pictures, and of a GGUF file what
    lies beside it."""
    if (gguf := gguf_at(directory)) is None:
        return repr(preprocessor_at(directory))
    from engine.checkpoint.gguf.projector import beside
    from engine.checkpoint.shards import fingerprint

    file = beside(gguf)
    return repr(fingerprint(file)) if file is not None else ""


def sizes_of(directory: Path, config: Mapping[str, Any]) -> Sizes:
    """How the model in a folder, which sees and has this configuration, cuts pictures.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if the file that says so is broken.
    """
    config = seeing_part(config)
    return SIGHTS[config["model_type"]].reading(config["vision_config"], preprocessor_at(directory), config)


def preprocessor_at(directory: Path) -> dict[str, Any]:
    """What a model's files say about preparing pictures; empty if they say nothing.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if they are broken.
    """
    if (gguf := gguf_at(directory)) is not None:
        from engine.checkpoint.gguf.file import read_gguf  # imports numpy, which others do not need
        from engine.checkpoint.gguf.projector import projector_of

        projector = projector_of(read_gguf(gguf))
        return projector.preprocessor if projector is not None else {}
    for name in _FILES:
        file = directory / name
        if file.is_file():
            said = read_json(file, MAX_CONFIG_BYTES)
            return said["image_processor"] if isinstance(said.get("image_processor"), dict) else said
    return {}


def picture_grid(sizes: Sizes, width: int, height: int) -> Grid:
    """The tokens of a picture of so many pixels.

    Raises:
        EngineError: `INVALID_REQUEST`: the model takes no such picture.
    """
    try:
        return sizes.grid(width, height)
    except ValueError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The model cannot read a picture of {width:,} x {height:,} pixels: {error}. Send a part of it.",
        ) from error


def picture_gflops(config: Mapping[str, Any], sizes: Sizes, tower_weights: int, grid: Grid) -> float:
    """Billions of operations that a tower does for a picture: two for each weight and patch, and attention's."""
    vision, patches = config["vision_config"], sizes.patches(grid)
    layers = len(vision.get("fullatt_block_indexes") or ()) or vision.get("depth") or vision.get("num_hidden_layers")
    attention = 4 * (layers or 0) * (vision.get("hidden_size") or 0) * patches**2
    return (2 * tower_weights * patches + attention) / 1e9


def usual_gflops(config: Mapping[str, Any], tower_weights: int) -> int:
    """The same of a picture of `USUAL_PIXELS` x `USUAL_PIXELS`, where the configuration alone is known."""
    sizes = SIGHTS[config["model_type"]].reading(config["vision_config"], {}, config)
    return round(picture_gflops(config, sizes, tower_weights, sizes.grid(USUAL_PIXELS, USUAL_PIXELS)))


def picture_tokens(directory: Path, width: int, height: int) -> int:
    """How many tokens a picture of so many pixels costs with the model in a folder; 0 if that reads text only.

    Raises:
        EngineError: as `picture_grid`, and if the model's files are broken.
    """
    config = seeing_part(read_config(directory))
    if not isinstance(config.get("vision_config"), dict) or config["model_type"] not in SIGHTS:
        return 0
    return picture_grid(sizes_of(directory, config), width, height).tokens
