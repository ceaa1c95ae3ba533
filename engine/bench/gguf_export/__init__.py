"""Writes GGUF files from a checkpoint's weights, so that a peer that reads GGUF runs the same model."""

from engine.bench.gguf_export.cached import gguf_of
from engine.bench.gguf_export.quantisation import Quantisation
from engine.bench.gguf_export.writing import write_gguf

__all__ = ["Quantisation", "gguf_of", "write_gguf"]
