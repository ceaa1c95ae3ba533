"""MiMo-V2-Flash: layers with a window have twice the key-value heads of others."""

from __future__ import annotations

from engine.families.family import Family, KvNumbers

FAMILY = Family(packs_rows=True, kv=KvNumbers(window_heads=2))
