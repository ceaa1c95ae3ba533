"""Models of a published model's shape with random weights, to measure speed without a download."""

from engine.bench.synthetic.checkpoint import is_synthetic, make_synthetic, resolve_model

__all__ = ["is_synthetic", "make_synthetic", "resolve_model"]
