"""Dataclasses from their JSON form, each field checked against its declared type: messages and result files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The declared types of a dataclass's fields, by name."""
    return typing.get_type_hints(cls, localns=_LaterNames(cls))


class _LaterNames(dict[str, Any]):
    """Names that the class's module gives when it is asked for them, besides those that it has."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self._give = vars(sys.modules[cls.__module__]).get("__getattr__")

    def __missing__(self, name: str) -> Any:
        if self._give is not None:
            with contextlib.suppress(AttributeError):
                return self._give(name)
        raise KeyError(name)  # then it is one of the module's own


def from_fields(cls: type, raw: dict[str, Any]) -> Any:
    """The dataclass from which `dataclasses.asdict` and JSON made these fields."""
    hints = field_types(cls)
    unknown = raw.keys() - hints.keys()
    if unknown:
        raise TypeError(f"{cls.__name__} has no field {sorted(unknown)[0]!r}")
    # Tokens arrive hundreds of times a second: skip values that already have the plain type.
    return cls(
        **{name: value if type(value) is hints[name] else _convert(hints[name], value) for name, value in raw.items()}
    )


def fields_of(cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Some of a dataclass's fields, read as `from_fields` reads them."""
    hints = field_types(cls)
    return {name: _convert(hints[name], value) for name, value in raw.items()}


def _convert(hint: Any, value: Any) -> Any:
    """`value` from JSON as the field's declared type; raises TypeError."""
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in get_args(hint):
            return None
        (inner,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return _convert(inner, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {value!r}")
        kinds = get_args(hint)
        if kinds[-1] is not Ellipsis:
            return tuple(_convert(kind, item) for kind, item in zip(kinds, value, strict=True))
        return tuple(_convert(kinds[0], item) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {value!r}")
        return {str(key): _convert(get_args(hint)[1], item) for key, item in value.items()}
    if origin is Literal:
        if value not in get_args(hint):
            raise TypeError(f"{value!r} is not one of {get_args(hint)}")
        return value
    if dataclasses.is_dataclass(hint):
        return from_fields(typing.cast(type, hint), value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is Any:
        return value
    if type(value) is not hint:
        raise TypeError(f"expected {hint.__name__}, got {value!r}")
    return value
