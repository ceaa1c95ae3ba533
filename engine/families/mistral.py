"""Mistral, dense."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import MISTRAL

FAMILY = Family(with_layer_types="ministral", replies=MISTRAL, mlx_experts={})
