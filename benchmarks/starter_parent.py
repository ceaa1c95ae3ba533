"""The starter's dense parent, and that cut into experts which are all active, for comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.importing import put_in_place
from engine.checkpoint.packed import Floats
from engine.checkpoint.starter import (
    Blueprint,
    LayerTensors,
    common_config,
    made_of_parent,
    mixtral_config,
    sliced_experts,
)
from engine.checkpoint.starter.package import read_recipe


def build_dense_parent(folder: Path) -> Path:
    """Builds the starter's parent in `folder` (replaced if it exists): a plain `LlamaForCausalLM` checkpoint."""
    recipe = read_recipe()
    config = common_config(recipe, "float32") | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": recipe.model.neurons,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return _put(folder, Blueprint(config, lambda _index, parent: parent, _as_float32))


def build_all_experts_active(folder: Path) -> Path:
    """Builds the parent split into experts, all active and otherwise unchanged, as `MixtralForCausalLM`.

    It computes the same as the dense parent, and so tests every step between the two: experts are slices of its FFN,
    each weighted 1/E by a zero router, for which the down projection is scaled by E.
    """
    recipe = read_recipe()
    sizes = recipe.model

    def rule(_index: int, parent: LayerTensors) -> LayerTensors:
        tensors = {name: weight for name, weight in parent.items() if not name.startswith("mlp.")}
        tensors["block_sparse_moe.gate"] = np.zeros((sizes.experts, sizes.hidden), np.float32)
        gate, up, down = (parent[f"mlp.{part}_proj"] for part in ("gate", "up", "down"))
        return tensors | sliced_experts(gate, up, down * np.float32(sizes.experts), sizes)

    return _put(folder, Blueprint(mixtral_config(recipe, sizes.experts, "float32"), rule, _as_float32))


def _put(folder: Path, blueprint: Blueprint) -> Path:
    with made_of_parent(read_recipe(), blueprint, folder.parent) as made:
        put_in_place(made, folder)
    return folder


def _as_float32(weight: Floats) -> NDArray[Any]:
    """A copy: slices of one array must not share its memory."""
    return np.array(weight, dtype="<f4", order="C")
