"""Finds a model's shape by what the user names: a shipped profile, a folder, or a hub id.

Where there is no profile, it follows from the configuration and the headers of the tensors, without reading weights.
"""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.catalogue import catalogue_shape, read_catalogue
from engine.checkpoint.config_file import read_config
from engine.checkpoint.counted_shape import shape_of
from engine.checkpoint.hub import candidate_shape, find_candidate, is_reference
from engine.checkpoint.model_directories import find_models
from engine.checkpoint.model_shape import ModelShape, model_names, read_model
from engine.checkpoint.names import STARTER_NAME, find_named, in_library, is_path_like, name_of, resolve
from engine.checkpoint.shards import read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import near_names


def find_shape(model: str) -> ModelShape:
    """The shape of a model, from headers alone.

    Args:
        model: `starter`, the name of a model on this machine, a checkpoint directory, a profile's name or file
            (`.json`), a name of the catalogue, or a reference to a hub (`ORG/NAME`, `ORG/NAME:Q4_K_M`). Without a
            profile, a hub model's headers are read over the network.

    Raises:
        EngineError: there is none, or it is not understood; the message says why, with suggestions.
    """
    if model.endswith(".json") or (model.casefold() in model_names() and in_library(model) is None):
        return read_model(model)
    found = find_named(model)
    if found is None and is_reference(model) and not Path(model).exists():
        return _known(model) or candidate_shape(find_candidate(model))
    if found is None and not is_path_like(model) and (listed := catalogue_shape(model)) is not None:
        return listed
    if found is None and model.strip() and not is_path_like(model) and model != STARTER_NAME:
        raise _unknown(model)
    folder = resolve(model)
    return shape_of(name_of(folder), read_config(folder), read_tensors(folder).values())


def is_on_hub(model: str) -> bool:
    """Whether `find_shape` would have to ask a hub."""
    return is_reference(model) and not Path(model).exists() and find_named(model) is None and _known(model) is None


def _known(hub_id: str) -> ModelShape | None:
    """The shipped profile of a model on the hub."""
    shapes = map(read_model, model_names())
    return next((shape for shape in shapes if shape.hub_id.casefold() == hub_id.casefold()), None)


def _unknown(model: str) -> EngineError:
    listed = [entry.name for entry in read_catalogue().entries]
    near = near_names(model, model_names() + listed + [found.name for found in find_models()[0]])
    meant = f"did you mean {' or '.join(near)}?" if near else f"known names are {', '.join(model_names())}."
    return EngineError(
        ErrorCode.MODEL_NOT_FOUND,
        f"There is no model called {model!r} in the library or among the known models: {meant} "
        "A model's folder works too, or its hub id, such as Qwen/Qwen3-30B-A3B.",
    )
