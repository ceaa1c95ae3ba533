"""Mistral, dense."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(mlx_experts={})
