"""Reads `config.json` of a checkpoint directory: what the model is, before anything of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import EngineError, ErrorCode

CONFIG_NAME = "config.json"
_MAX_BYTES = 16 * 2**20
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")


def read_config(directory: Path) -> dict[str, Any]:
    """The content of `directory/config.json`.

    Raises:
        EngineError: `MODEL_NOT_FOUND` if there is no such directory, `CHECKPOINT_DAMAGED` if the file is absent or
            broken, `MODEL_UNSUPPORTED` if it does not say what kind of model this is.
    """
    if not directory.exists():
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"There is no model at {directory}: check the path.")
    if directory.is_file():
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, _why_no_file(directory))
    file = directory / CONFIG_NAME
    if not file.is_file():
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{directory} has no {CONFIG_NAME}, so it is not a complete model: download or copy it again.",
        )
    config = read_json(file, _MAX_BYTES)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{file} does not name a model_type, so Switchyard cannot tell how to run this model.",
        )
    return config


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if it cannot be read or is no JSON object.
    """
    try:
        if file.stat().st_size > max_bytes:
            raise ValueError("it is far too big")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{file} cannot be read ({error}): download or copy the model again.",
        ) from error
    if not isinstance(content, dict):
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED, f"{file} holds no JSON object: download or copy the model again."
        )
    return content


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model inside a multimodal one, or `config` itself."""
    for key in _TEXT_KEYS:
        nested = config.get(key)
        if isinstance(nested, dict):
            return text_part(nested)
    return config


def _why_no_file(file: Path) -> str:
    if file.suffix.lower() == ".gguf":
        return (
            f"{file.name} is a GGUF file, which Switchyard cannot run yet: use the model's safetensors folder instead."
        )
    return f"{file} is a file: give the folder that holds the model's config.json and safetensors files."
