"""SmolLM3, dense."""

from __future__ import annotations

from engine.families.family import Family, fast_path
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    fast_path=fast_path(
        "SmolLM3",
        rotates=lambda attention: bool(attention.use_rope),
    ),
)
