"""Families that transformers lacks: models of our own, made of the library's parts.

Each is a module named like its row in `engine.families`, with a configuration whose fields are those of published
`config.json` files, and a model whose tensors bear the published names but for what its conversions say. `make_known`
tells the library, and from then on all else treats it like the library's own.
"""

from __future__ import annotations

from importlib import import_module

from engine.families import PACKAGES, family_of


def make_known(model_type: str) -> None:
    """Lets the library know a `model_type` that is a family of ours."""
    if family_of(model_type).own:
        import_module(f"{__name__}.{PACKAGES[model_type]}")
