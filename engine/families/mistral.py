"""Mistral, dense."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import MISTRAL

FAMILY = Family(replies=MISTRAL, mlx_experts={})
