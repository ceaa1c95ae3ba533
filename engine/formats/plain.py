"""Formats without tiles: those of checkpoints, and the reference for everything else."""

from __future__ import annotations

from engine.formats.weight_format import PlainFormat

FP32 = PlainFormat(name="fp32", words="32-bit", bits=32.0, dtype="float32", on_card=True)
BF16 = PlainFormat(name="bf16", words="16-bit", bits=16.0, dtype="bfloat16", worth=1.0, native=0, on_card=True)
