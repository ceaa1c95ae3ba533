"""Model families, by the transformers package with their classes.

A family without special needs is listed nowhere: the library and the configuration say how to run it. Of the others
usual ones have a row in `table.py`, odd ones a file with a `FAMILY` and its line in `FILES`; those that are read from
GGUF files have a row in `gguf`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Literal, cast

from engine.families.family import Family, FastPath
from engine.families.table import TABLE

FILES: dict[str, tuple[str, ...]] = {
    "dbrx": ("dbrx",),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v3",),
    "ernie4_5_moe": ("ernie4_5_moe",),
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "glm4_moe": ("glm4_moe",),
    "gpt_oss": ("gpt_oss",),
    "granitemoe": ("granitemoe",),
    "granitemoehybrid": ("granitemoehybrid",),
    "granitemoeshared": ("granitemoeshared",),
    "hunyuan_v1_moe": ("hunyuan_v1_moe",),
    "lfm2_moe": ("lfm2_moe",),
    "llama": ("llama",),
    "llama4": ("llama4", "llama4_text"),
    "minimax_m2": ("minimax_m2",),
    "mixtral": ("mixtral",),
    "olmoe": ("olmoe",),
    "phi3": ("phi3",),
    "phimoe": ("phimoe",),
    "qwen2": ("qwen2",),
    "qwen2_moe": ("qwen2_moe",),
    "qwen3": ("qwen3",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_moe": ("qwen3_moe",),
    "qwen3_next": ("qwen3_next",),
    "smollm3": ("smollm3",),
}
"""File -> its `model_type`s.  A file is imported when one of them is first looked up."""

PACKAGES = {
    model_type: package
    for package, types in {**FILES, **{each: row.types or (each,) for each, row in TABLE.items()}}.items()
    for model_type in types
}
"""`model_type` -> the library's package with its classes, of all families that are listed."""

_NEEDS_NOTHING = Family()


def family_of(model_type: str) -> Family:
    """The family of this transformers `model_type`; the default family if it is not listed."""
    return _read(PACKAGES.get(model_type, ""))


def family_at(module: str) -> Family:
    """The family whose classes are in the library's module of this name (`transformers.models.llama.modeling_llama`).

    The default family if it is not listed, or the module is not transformers'.
    """
    place = module.split(".")
    return _read(place[2]) if place[:2] == ["transformers", "models"] and len(place) > 2 else _NEEDS_NOTHING


def fast_path_of(module: object, part: Literal["model", "layer", "attention", "block"]) -> FastPath | None:
    """The fast path of the family in which `module` is this part: an instance of exactly that library class.

    Returns:
        `None` if the class is not known.
    """
    kind = type(module)
    path = family_at(kind.__module__).fast_path
    return path if path is not None and kind.__name__ == getattr(path, part) else None


@cache
def _read(package: str) -> Family:
    if package in FILES:
        return cast(Family, import_module(f"{__name__}.{package}").FAMILY)
    return TABLE.get(package, _NEEDS_NOTHING)
