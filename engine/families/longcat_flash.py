"""LongCat-Flash: each layer attends twice."""

from __future__ import annotations

from engine.families.family import Family, KvNumbers

FAMILY = Family(adapter="longcat_flash", kv=KvNumbers(attentions=2))
