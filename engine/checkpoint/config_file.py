"""Reads `config.json` of a checkpoint directory, or what stands for it in a GGUF file: what the model is."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf.names import gguf_at
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import DEEPEST, parse_json, read_foreign, reason
from engine.common.plain_text import quoted
from engine.families import family_of

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 * 2**20
TEXT_CLASS = re.compile(r"(CausalLM|ConditionalGeneration|LMHeadModel|Seq2SeqLM|BlockDiffusion)$")
"""How the names of classes end that write text."""
_MOST = ((re.compile(r"(^|_)(layers|n_layer|num_layer)$"), 4096), (re.compile("experts"), 2**20))
"""Names of numbers that are checked."""
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
_INPUTS = {"vision_config": "images", "audio_config": "sound", "sound_config": "sound"}


def read_config(directory: Path) -> dict[str, Any]:
    """The content of `directory/config.json`, or the same of a GGUF file (or a folder with one).

    Raises:
        EngineError: `MODEL_NOT_FOUND` if there is no such directory, `CHECKPOINT_DAMAGED` if the file is absent or
            broken, `MODEL_UNSUPPORTED` if it does not say what kind of model this is, or if its kind is refused.
    """
    gguf = gguf_at(directory)
    if gguf is not None:
        from engine.checkpoint.gguf.checkpoint import gguf_config  # imports numpy, which others do not need
        from engine.checkpoint.gguf.file import read_gguf

        config = gguf_config(read_gguf(gguf))
        check_numbers(gguf, config)
        return config
    if not directory.exists():
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"There is no model at {directory}: check the path.")
    if directory.is_file():
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{directory} is a file: give the folder with the model's config.json and safetensors files.",
        )
    file = directory / CONFIG_NAME
    if not file.exists():
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{directory} has no {CONFIG_NAME}, so it is not a complete model: download or copy it again.",
        )
    config = read_json(file, MAX_CONFIG_BYTES)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{file} does not name a model_type, so Switchyard does not know how to run this model.",
        )
    check_numbers(file, config)
    why = family_of(config["model_type"]).refused
    if why:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{directory.name} is a {config['model_type']!r} model, which Switchyard does not run: it {why}.",
        )
    return config


def check_numbers(file: Path, config: dict[str, Any]) -> None:
    """Rejects absurd counts, which we and the library would loop over, and numbers too large to compute with.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`.
    """
    held = list(config.items())
    while held:
        key, value = held.pop()
        if isinstance(value, dict):
            held += value.items()
        elif isinstance(value, list):
            held += ((key, item) for item in value)
        elif isinstance(value, int | float):
            most = next((most for names, most in _MOST if names.search(key)), math.inf)
            if abs(value) > most or (isinstance(value, int) and abs(value) >= 2**63):
                shown = f"{value:,}" if abs(value) < 2**63 else "a number of more than 63 bits"
                raise EngineError(
                    ErrorCode.CHECKPOINT_DAMAGED,
                    f"{file} gives {quoted(key)} as {shown}, which is not plausible: download or copy the model again.",
                )


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if it cannot be read or is not a JSON object.
    """
    try:
        content = parse_json(read_foreign(file, max_bytes), deepest=DEEPEST)
    except (OSError, ValueError) as error:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{file} cannot be read ({reason(error)}): download or copy the model again.",
        ) from error
    if not isinstance(content, dict):
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED, f"{file} is not a JSON object: download or copy the model again."
        )
    return content


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model inside a multimodal one, or `config` itself."""
    for key in _TEXT_KEYS:
        nested = config.get(key)
        if isinstance(nested, dict):
            return text_part(nested)
    return config


def unread_inputs(config: dict[str, Any]) -> str:
    """Inputs other than text that the model accepts, as display text (`images and sound`); empty if none."""
    found = [_INPUTS[key] for key in _INPUTS if isinstance(config.get(key), dict)]
    nested = config.get("thinker_config")
    if isinstance(nested, dict):
        return unread_inputs(nested)
    return " and ".join(dict.fromkeys(found))
