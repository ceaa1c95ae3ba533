"""Model families, by the package of transformers, or the module of ours, with their classes.

A family without special needs is listed nowhere: the library and the configuration say how to run it. Of the others
each has a row in `table.py`, and those that are read from GGUF files one in `gguf`.
"""

from __future__ import annotations

from typing import Literal

from engine.families.family import Family, FastPath
from engine.families.table import TABLE

PACKAGES = {model_type: package for package, row in TABLE.items() for model_type in row.types or (package,)}
"""`model_type` -> the library's package with its classes, of all families that are listed."""

_NEEDS_NOTHING = Family()


def family_of(model_type: str) -> Family:
    """The family of this transformers `model_type`; the default family if it is not listed."""
    return TABLE.get(PACKAGES.get(model_type, ""), _NEEDS_NOTHING)


def family_at(module: str) -> Family:
    """The family whose classes are in the library's module of this name (`transformers.models.llama.modeling_llama`).

    The default family if it is not listed, or the module is neither transformers' nor one of `engine.runtime.own`.
    """
    place = module.split(".")
    theirs, ours = place[:2] == ["transformers", "models"], place[:3] == ["engine", "runtime", "own"]
    name = ".".join(place[2:3] if theirs else place[3:] if ours else ())
    return TABLE.get(name, _NEEDS_NOTHING)


def fast_path_of(module: object, part: Literal["model", "layer", "attention", "delta", "block"]) -> FastPath | None:
    """The fast path of the family in which `module` is this part: an instance of exactly that library class.

    Returns:
        `None` if the class is not known.
    """
    kind = type(module)
    path = family_at(kind.__module__).fast_path
    return path if path is not None and kind.__name__ == getattr(path, part) else None
