"""The starter model: a small real Mixture of Experts, built on the user's machine from a pinned package.

resources/starter/CARD.md describes it and its quality; `recipe.json` there pins everything it is built from.
"""

from __future__ import annotations

from engine.checkpoint.starter.build import build_all_experts_active, build_dense_parent, build_starter

__all__ = ["build_all_experts_active", "build_dense_parent", "build_starter"]
