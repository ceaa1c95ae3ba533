"""DiffusionGemma."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(refused="fills in whole blocks of text at a time, and Switchyard runs models that write token by token")
