"""Reads `config.json` of a checkpoint directory, or what stands for it in a GGUF file: what the model is."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf import gguf_at
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import quoted
from engine.common.untrusted import DEEPEST, parse_json, read_untrusted, reason
from engine.families import family_of

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 16 * 2**20
TEXT_CLASS = re.compile(r"(CausalLM|ConditionalGeneration|LMHeadModel|Seq2SeqLM|BlockDiffusion)$")
"""How the names of classes end that write text."""
# The families' names for the same value; the first positive number counts.
EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "moe_num_primary_experts",
    "num_routed_experts",
    "n_experts",
)
PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k", "top_k",
    "experts_per_token", "num_selected_experts", "num_experts_per_topk", "moe_num_active_primary_experts",
)  # fmt: skip
_ABOVE_ZERO = 1e-30
_RANGES = tuple(
    (re.compile(names), least, most)
    for names, least, most in (
        (r"^((num|n|num_hidden|num_decoder|encoder|decoder)_layers?|depth)$", 1, 4096),
        (r"(^|_)layers$", 0, 4096),
        (r"^(num_selected_experts|moe_topk|moe_top_k|moe_k|top_k_experts)$|experts_per_to", 0, 2**12),
        (r"experts", 0, 2**20),
        (r"^make_ngram_vocab_size_divisible_by$", 1, 2**36),  # of a GGUF file, all rows of its table
        (r"vocab_size", 1, 2**28),
        (r"^(hidden_size|d_model|n_embd|n_heads?|num_heads|num_attention_heads|num_key_value_heads)$", 1, 2**20),
        (r"heads$", 0, 2**16),
        (r"head_dim$|^(kv_channels|d_kv)$", 0, 2**16),
        (r"^layer_rope_theta$", 0, 1e30),
        (r"(_size|_dim|_rank|_width|kernel|_groups?|_period|_step|_pattern|_interval)$", -1, 2**28),
        (r"(^|_)theta$|_base_freq$|^factor$", _ABOVE_ZERO, 1e30),
        (r"^partial_rotary_factor$", _ABOVE_ZERO, 1),
        (r"^(max_position_embeddings|n_positions|max_seq_len|original_max_position_embeddings)$", 1, 2**27),
        (r"eps(ilon)?$", 0, 1),
    )
)
"""Names of numbers that are checked, the least and the most that they may be; the first that fits counts.

Some files say -1 where there is none.
"""
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
_MAY_BE_INFINITE = "time_step_limit"
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
        from engine.checkpoint.gguf.projector import projector_of

        model = read_gguf(gguf)
        config, projector = gguf_config(model), projector_of(model)
        if projector is not None:
            config = projector.whole_config(config)
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
    """Rejects numbers that no model has: absurd counts, which we and the library would loop over, and what breaks
    arithmetic.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`.
    """
    held: list[tuple[str, Any]] = [("", config)]
    while held:
        key, value = held.pop()
        if isinstance(value, dict) and value.keys() == {"__float__"}:  # as the library writes what JSON lacks
            value = {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value["__float__"]), math.nan)
        if isinstance(value, dict):
            _check_together(file, value)
            held += value.items()
        elif isinstance(value, list):
            held += ((key, item) for item in value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            least, most = next(((low, high) for names, low, high in _RANGES if names.search(key)), (-(2**63), 2**63))
            if not least <= value <= most and not (key == _MAY_BE_INFINITE and value == math.inf):
                raise _senseless(file, key, value)


def _check_together(file: Path, part: dict[str, Any]) -> None:
    """Rejects more experts per token than there are, uneven groups of them, and heads that cannot share keys."""
    experts = next((part[name] for name in EXPERTS if type(part.get(name)) is int), 0)
    for name in PER_TOKEN:
        is_sampling = name == "top_k"  # may stand here, too
        if experts and not is_sampling and type(part.get(name)) is int and not 0 < part[name] <= experts:
            raise _senseless(file, name, part[name], f" of {experts:,} experts")
    groups, chosen = part.get("n_group"), part.get("topk_group")
    if experts and type(groups) is int and groups > 1:
        if experts % groups:
            raise _senseless(file, "n_group", groups, f" of {experts:,} experts")
        if type(chosen) is int and not 0 < chosen <= groups:
            raise _senseless(file, "topk_group", chosen, f" of {groups:,} groups")
    for name in _WINDOWS:
        window = part.get(name)
        if (
            isinstance(window, int | float)
            and (window is True or not window >= 1)
            and part.get("use_sliding_window") is not False
        ):
            raise _senseless(file, name, window)
    heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and shared > 0 and heads % shared and not part.get("kv_lora_rank"):
        raise _senseless(file, "num_key_value_heads", shared, f" for {heads:,} heads")


def _senseless(file: Path, key: str, value: float, more: str = "") -> EngineError:
    shown = f"{value:,}" if abs(value) < 2**63 or value != value else "a number of more than 63 bits"
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"{file} gives {quoted(key)} as {shown}{more}, which is not plausible: get another version of the model.",
    )


def read_json(file: Path, max_bytes: int) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if it cannot be read or is not a JSON object.
    """
    try:
        content = parse_json(read_untrusted(file, max_bytes), deepest=DEEPEST)
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


def unread_inputs(config: dict[str, Any], *, sees: bool = False) -> str:
    """Inputs of the model that it is not given, as display text (`images and sound`); empty if there are none."""
    found = [_INPUTS[key] for key in _INPUTS if isinstance(config.get(key), dict) and not (sees and "vision" in key)]
    nested = config.get("thinker_config")
    if isinstance(nested, dict):
        return unread_inputs(nested, sees=sees)
    return " and ".join(dict.fromkeys(found))
