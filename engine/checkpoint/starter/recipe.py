"""The starter's recipe: the parent's package, the file with the changes, and the model's dimensions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.common.paths import resources_dir


@dataclass(frozen=True, slots=True)
class ParentPackage:
    """The package index's wheel that contains the parent model as a GGUF file, pinned by hash."""

    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    licence_member: str


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of the parent and of the experts it is split into; `neurons` is the parent's FFN width."""

    layers: int
    hidden: int
    neurons: int
    experts: int
    experts_per_token: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    rope_theta: float
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int

    @property
    def expert_neurons(self) -> int:
        """FFN width of one expert."""
        return self.neurons // self.experts


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the starter checkpoint, byte for byte."""

    folder: Path
    name: str
    parent: ParentPackage
    delta_path: Path
    delta_sha256: str
    model: Dimensions
    generation: dict[str, Any]


def read_recipe(folder: Path | None = None) -> Recipe:
    """The recipe shipped in `resources/starter` (or in `folder`)."""
    folder = folder or resources_dir() / "starter"
    raw = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    return Recipe(
        folder=folder,
        name=raw["name"],
        parent=ParentPackage(**raw["parent"]),
        delta_path=folder / raw["delta"]["file"],
        delta_sha256=raw["delta"]["sha256"],
        model=Dimensions(**raw["model"]),
        generation=raw["generation"],
    )
