"""Model families, one file each, named after the transformers package with their classes.

A family without special needs has no file: the library and the configuration say how to run it. Any other has a file
here with a `FAMILY`, and its line in `FILES`; those that are read from GGUF files have one in `GGUF`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Literal, cast

from engine.families.family import Family, FastPath

FILES: dict[str, tuple[str, ...]] = {
    "afmoe": ("afmoe",),
    "aria": ("aria_text",),
    "axk1": ("axk1",),
    "beam": ("beam",),
    "cohere2_moe": ("cohere2_moe",),
    "dbrx": ("dbrx",),
    "deepseek_ocr2": ("deepseek_ocr2",),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "deepseek_v4": ("deepseek_v4",),
    "diffusion_gemma": ("diffusion_gemma",),
    "doge": ("doge",),
    "dots1": ("dots1",),
    "ernie4_5_moe": ("ernie4_5_moe",),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe_text",),
    "exaone_moe": ("exaone_moe",),
    "flex_olmo": ("flex_olmo",),
    "flint": ("flint",),
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_assistant": ("gemma4_assistant",),
    "glm4_moe": ("glm4_moe",),
    "glm4_moe_lite": ("glm4_moe_lite",),
    "glm4v_moe": ("glm4v_moe_text",),
    "glm5_next": ("glm5_next",),
    "gpt_oss": ("gpt_oss",),
    "granitemoe": ("granitemoe",),
    "granitemoe_swa": ("granitemoe_swa",),
    "granitemoehybrid": ("granitemoehybrid",),
    "granitemoeshared": ("granitemoeshared",),
    "hunyuan_v1_moe": ("hunyuan_v1_moe",),
    "hy_v3": ("hy_v3",),
    "hy_v4": ("hy_v4",),
    "jamba": ("jamba",),
    "jetmoe": ("jetmoe",),
    "kolibri1": ("kolibri1",),
    "laguna": ("laguna",),
    "lfm2_moe": ("lfm2_moe",),
    "llama": ("llama",),
    "llama4": ("llama4", "llama4_text"),
    "longcat_flash": ("longcat_flash",),
    "mellum": ("mellum",),
    "mimo_v2_flash": ("mimo_v2_flash",),
    "minimax": ("minimax",),
    "minimax_m2": ("minimax_m2",),
    "minimax_m3_vl": ("minimax_m3_vl",),
    "ministral": ("ministral",),
    "mistral": ("mistral",),
    "mistral4": ("mistral4",),
    "mixtral": ("mixtral",),
    "muse_spark": ("muse_spark_text",),
    "nemotron3_5_transcribe": ("nemo_speechlm",),
    "nllb_moe": ("nllb-moe",),
    "olmoe": ("olmoe",),
    "openai_privacy_filter": ("openai_privacy_filter",),
    "phi3": ("phi3",),
    "phi4_multimodal": ("phi4_multimodal",),
    "phimoe": ("phimoe",),
    "qwen2": ("qwen2",),
    "qwen2_moe": ("qwen2_moe",),
    "qwen3": ("qwen3",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_moe": ("qwen3_moe",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_omni_moe": ("qwen3_omni_moe",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "smollm3": ("smollm3",),
    "solar_open": ("solar_open",),
    "step3p7": ("step3p7", "step3p5"),
    "switch_transformers": ("switch_transformers",),
    "unlimited_ocr": ("unlimited_ocr",),
}
"""File -> its `model_type`s.  A file is imported when one of them is first looked up."""

GGUF: dict[str, tuple[str, ...]] = {
    "dbrx": ("dbrx",),
    "deepseek2": ("deepseek_v2", "deepseek_v3"),
    "ernie4_5-moe": ("ernie4_5_moe",),
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "glm4moe": ("glm4_moe",),
    "gpt-oss": ("gpt_oss",),
    "granitehybrid": ("granitemoehybrid",),
    "granitemoe": ("granitemoe", "granitemoeshared"),
    "hunyuan-moe": ("hunyuan_v1_moe",),
    "lfm2moe": ("lfm2_moe",),
    "llama": ("llama", "mixtral"),
    "llama4": ("llama4_text",),
    "minimax-m2": ("minimax_m2",),
    "olmoe": ("olmoe",),
    "phi3": ("phi3",),
    "phimoe": ("phimoe",),
    "qwen2": ("qwen2",),
    "qwen2moe": ("qwen2_moe",),
    "qwen3": ("qwen3",),
    "qwen35moe": ("qwen3_5_moe_text",),
    "qwen3moe": ("qwen3_moe",),
    "qwen3next": ("qwen3_next",),
    "smollm3": ("smollm3",),
}
"""llama.cpp's name of an architecture -> the `model_type`s that have it."""

_FILE_OF = {model_type: file for file, model_types in FILES.items() for model_type in model_types}
_NEEDS_NOTHING = Family()


def family_of(model_type: str) -> Family:
    """The family of this transformers `model_type`; the default family if it is not listed."""
    file = _FILE_OF.get(model_type)
    return _NEEDS_NOTHING if file is None else _read(file)


def family_at(module: str) -> Family:
    """The family whose classes are in the library's module of this name (`transformers.models.llama.modeling_llama`).

    The default family if it is not listed, or the module is not transformers'.
    """
    place = module.split(".")
    if place[:2] != ["transformers", "models"] or len(place) < 3 or place[2] not in FILES:
        return _NEEDS_NOTHING
    return _read(place[2])


def fast_path_of(module: object, part: Literal["model", "layer", "attention", "block"]) -> FastPath | None:
    """The fast path of the family in which `module` is this part: an instance of exactly that library class.

    Returns:
        `None` if the class is not known.
    """
    kind = type(module)
    path = family_at(kind.__module__).fast_path
    return path if path is not None and kind.__name__ == getattr(path, part) else None


@cache
def _read(file: str) -> Family:
    return cast(Family, import_module(f"{__name__}.{file}").FAMILY)
