"""What a checkpoint says about how its weights are quantised, in config.json or in a file beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import MAX_CONFIG_BYTES, read_json, text_part
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import quoted

LIBRARY_METHODS = ("fp8", "mxfp8", "mxfp4")
"""Values of `quant_method` whose weights transformers unpacks while it loads."""
MLX = "mlx"
BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of older checkpoints whose config.json says nothing, and the method that each stands for."""
_METHODS = (*LIBRARY_METHODS, "gptq", "awq", "compressed-tensors", "modelopt", MLX)


def quantisation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says, with `quant_method`; empty if it says nothing.

    MLX writes the key `quantization`, and a copy of it as `quantization_config`; it names no method.
    """
    for holder in (config, text_part(dict(config))):
        for key in ("quantization_config", "quantization"):
            stored = holder.get(key)
            if isinstance(stored, dict) and stored:
                by_mlx = "quant_method" not in stored and "bits" in stored
                return {"quant_method": MLX, **stored} if by_mlx else dict(stored)
    return {}


def declared_quantisation(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The same, also from files beside config.json; `quant_method` is one that can be read.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` for any other; `CHECKPOINT_DAMAGED` if a file beside is broken.
    """
    stored = quantisation_of(config)
    for name, method in BESIDE.items():
        if not stored and (directory / name).is_file():
            beside = read_json(directory / name, MAX_CONFIG_BYTES)
            nested = beside.get("quantization")
            stored = {"quant_method": method, **(nested if isinstance(nested, dict) else beside)}
    if not stored:
        return {}
    method = str(stored.get("quant_method"))
    if method == "auto-round":
        packing = str(stored.get("packing_format"))
        method = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}.get(packing, f"{method} ({packing})")
    if method not in _METHODS:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{directory.name} is quantised with {quoted(method)}, which Switchyard cannot "
            "read: use the model's original, FP8, MXFP4, GPTQ, AWQ or compressed-tensors version.",
        )
    return {**stored, "quant_method": method}


def left_out_note(directory: Path, config: Mapping[str, Any]) -> str:
    stored = declared_quantisation(directory, config)
    groups = stored.get("config_groups")
    schemes = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    left_out = []
    if stored.get("quant_method") not in LIBRARY_METHODS and (
        any(scheme.get("input_activations") for scheme in schemes) or stored.get("quant_algo") in ("FP8", "NVFP4")
    ):
        left_out.append("activations")
    if any(stored.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo")):
        left_out.append("the context's keys and values")
    if not left_out:
        return ""
    return f"The model was made for quantised {' and for '.join(left_out)} too: here they keep their full precision."


def check_none_is_packed(model: str, names: Iterable[str]) -> None:
    """For checkpoints that do not say that they are quantised: none may be all the same."""
    packed = ("qweight", "qzeros", "weight_packed", "g_idx")
    for key in names:
        if key.rpartition(".")[2] in packed:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"{model} holds quantised weights ({quoted(key)}), but its config.json does not say how they are: use "
                "another version of the model.",
            )
