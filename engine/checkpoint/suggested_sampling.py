"""How a checkpoint's makers suggest to sample it: `generation_config.json`, or a GGUF file's metadata."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import MAX_CONFIG_BYTES, read_json
from engine.checkpoint.gguf.names import gguf_at
from engine.checkpoint.manifest import read_manifest
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.common.paths import resources_dir

_ALWAYS = ("repetition_penalty", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range", "dry_breakers")
"""What counts for greedy answers too.  The library's own file format has no DRY: these names are ours."""
_IF_SAMPLED = ("top_k", "top_p", "min_p")


def suggested_sampling(directory: Path) -> SamplingParams:
    """The sampling that a checkpoint suggests; greedy if it suggests none, as in transformers.

    What is missing, cannot be read or makes no sense is left out: no reason not to answer.  A starter that was built
    before takes the suggestions of the recipe shipped with the program, as those may have become better.
    """
    raw: dict[str, Any] = {}
    with contextlib.suppress(EngineError):
        gguf = gguf_at(directory)
        if gguf is not None:
            from engine.checkpoint.gguf.checkpoint import gguf_generation  # imports numpy, which others do not need
            from engine.checkpoint.gguf.file import read_gguf

            raw = gguf_generation(read_gguf(gguf))
        else:
            raw = _of_starter(directory) or read_json(directory / "generation_config.json", MAX_CONFIG_BYTES)
    sampling = SamplingParams()
    names = list(_ALWAYS)
    if raw.get("do_sample") is True:
        sampling = SamplingParams(temperature=1.0)
        names += ["temperature", *_IF_SAMPLED]
    kinds = {field.name: type(getattr(sampling, field.name)) for field in fields(sampling)}
    for name in names:
        value = _as(kinds[name], raw.get(name))
        if value is not None:
            with contextlib.suppress(EngineError):
                sampling = replace(sampling, **{name: value})
    return sampling


def _of_starter(directory: Path) -> dict[str, Any] | None:
    """The recipe's suggestions, if this is the starter."""
    manifest = read_manifest(directory)
    if manifest is None or not manifest.source.startswith("recipe "):
        return None
    recipe = read_json(resources_dir() / "starter" / "recipe.json", MAX_CONFIG_BYTES)
    suggested: dict[str, Any] = recipe["generation"]
    return suggested if manifest.source.startswith(f"recipe {recipe['name']} ") else None


def _as(kind: type, value: object) -> Any:
    """A JSON value as a field's type; `None` if it is of another."""
    if kind is tuple:
        return tuple(value) if isinstance(value, list) and all(isinstance(text, str) for text in value) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    return kind(value)
