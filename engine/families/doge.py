"""Doge: its experts mix the routing of all tokens of a forward."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(exact_tokens=lambda config: 0 if config.get("is_moe") else None)
