"""SmolLM3, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family, fast_path
from engine.families.gguf import ENDS, FEED_FORWARD, NORMS, ROTATED_ATTENTION, File, Gguf
from engine.families.replies import HERMES


def _computed(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return {
        # llama.cpp rotates all layers but every fourth.
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in layers],
        "layer_types": ["full_attention" for _ in layers],
    }


FAMILY = Family(
    replies=HERMES,
    fast_path=fast_path(
        "SmolLM3",
        rotates=lambda attention: bool(attention.use_rope),
    ),
    gguf=Gguf(
        architecture="smollm3",
        constants={"use_sliding_window": False},
        computed=_computed,
        tensors={**ENDS, **NORMS, **ROTATED_ATTENTION, **FEED_FORWARD},
    ),
)
