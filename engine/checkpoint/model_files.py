"""Model profiles shipped with the program: JSON in `resources/models`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.checkpoint.model_shape import Attention, ModelShape
from engine.common.paths import resources_dir
from engine.common.profile_file import ProfileFile, find_profile, refused

_OPTIONAL_COUNTS = ("dense_layers", "shared_width", "dense_width")
_WITH_DEFAULT = {"expert_matrices": 3, "other_weights": 0, "kv_numbers": 0, "left_out_weights": 0}


def models_dir() -> Path:
    return resources_dir() / "models"


def model_names(folder: Path | None = None) -> list[str]:
    """Names of all models, sorted."""
    return sorted(path.stem for path in (folder or models_dir()).glob("*.json"))


def read_model(name: str, folder: Path | None = None) -> ModelShape:
    """The model of this name, or in this JSON file.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or its file has invalid values.
    """
    path = find_profile(name, folder or models_dir(), model_names(folder), "model")
    file = ProfileFile(path)
    attention = file.part("attention")
    values: dict[str, Any] = {
        field.name: file.whole(field.name, 0 if field.name in _OPTIONAL_COUNTS else 1, 10**9)
        for field in fields(ModelShape)
        if field.type == "int" and field.name not in _WITH_DEFAULT
    }
    values |= {name: file.whole(name, 0, 10**13, default=usual) for name, usual in _WITH_DEFAULT.items()}
    if values["experts_per_token"] > values["experts"] or values["dense_layers"] >= values["layers"]:
        raise refused(path, "uses more experts per token, or has more dense layers, than the model has")
    return ModelShape(
        name=path.stem,
        hub_id=file.text("hub_id"),
        licence=file.text("licence"),
        source=file.text("source"),
        attention=Attention(
            heads=attention.whole("heads", 1, 10**4),
            kv_heads=attention.whole("kv_heads", 1, 10**4),
            head_dim=attention.whole("head_dim", 1, 10**4),
            latent=attention.whole("latent", 0, 10**5, default=0),
            query_latent=attention.whole("query_latent", 0, 10**5, default=0),
        ),
        parameters=file.number("parameters", 1e6, 1e14),
        tied_embeddings=bool(file.content.get("tied_embeddings", False)),
        expert_biases=bool(file.content.get("expert_biases", False)),
        **values,
    )
