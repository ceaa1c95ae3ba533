"""DeepSeek-OCR 2."""

from __future__ import annotations

from engine.families.family import READS_PICTURES, Family

FAMILY = Family(refused=READS_PICTURES)
