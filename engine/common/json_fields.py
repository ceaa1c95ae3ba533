"""Dataclasses from their JSON form, each field checked against its declared type: messages, results, and profiles.

Profiles are JSON files of machines and models, shipped with the program or written by the user: an impossible number is
an error with a message, and never used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import parse_json, read_untrusted, reason


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


GIGA = 1e9
MAX_PROFILE_BYTES = 2**20
_MOST_NEAR, _NEAR_ENOUGH = 4, 0.5


def near_names(name: str, names: Sequence[str]) -> list[str]:
    """Likely intended names, best match first; case is ignored."""
    plain = {each.casefold(): each for each in names}
    wanted = name.casefold().rpartition("/")[2]
    holding = [each for each in plain if wanted and wanted in each]
    close = difflib.get_close_matches(wanted, plain, _MOST_NEAR, _NEAR_ENOUGH)
    return [plain[each] for each in dict.fromkeys([*holding, *close])][:_MOST_NEAR]


def best_match(text: str, names: Sequence[str]) -> str | None:
    """The name that a few letters of it mean, spaces and dashes aside: the one with all these words, the shortest of
    several."""

    def run_together(name: str) -> str:
        return re.sub(r"[\W_]+", "", name.casefold())

    words = list(filter(None, map(run_together, text.split())))
    holding = [each for each in names if words and all(word in run_together(each) for word in words)]
    return min(holding, key=lambda each: (each.casefold() != text.strip().casefold(), len(each)), default=None)


def profile_names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))


def find_profile(name: str, folder: Path, kind: str) -> Path:
    if name.endswith(".json"):
        return Path(name)
    names = profile_names(folder)
    exact = {each.casefold(): each for each in names}.get(name.casefold())
    if exact is None:
        near = near_names(name, names)
        known = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names) or '(none)'}."
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"There is no {kind} profile called {name!r}: {known} A JSON file of your own works too.",
        )
    return folder / f"{exact}.json"


class ProfileFile:
    """A JSON object whose fields are checked as they are read; `prefix` is its path inside the file."""

    def __init__(self, path: Path, content: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        self.path, self.prefix = path, prefix
        if content is None:
            try:
                content = parse_json(read_untrusted(path, MAX_PROFILE_BYTES))
            except FileNotFoundError:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no profile {path}: choose another.") from None
            except (OSError, ValueError) as error:
                raise refused(path, f"cannot be read ({reason(error)})") from None
            if not isinstance(content, dict):
                raise refused(path, "is not a JSON object")
        self.content: Mapping[str, Any] = content

    def part(self, key: str, *, optional: bool = False) -> Any:
        value = self.content.get(key)
        if optional and value is None:
            return None
        if not isinstance(value, dict):
            raise refused(self.path, f"has no object {self.prefix + key!r}")
        return ProfileFile(self.path, value, f"{self.prefix}{key}.")

    def text(self, key: str) -> str:
        value = self.content.get(key)
        if not isinstance(value, str) or not value.strip():
            raise refused(self.path, f"has no text in {self.prefix + key!r}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        return self._checked(self.content.get(key), key, low, high)

    def whole(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """A whole number within limits."""
        value = self.content.get(key, default)
        checked = self._checked(value, key, low, high)
        if checked != int(checked):
            raise refused(self.path, f"has {value!r} in {self.prefix + key!r}, which must be a whole number")
        return int(checked)

    def by_threads(self, key: str) -> dict[int, float]:
        """Rates in bytes per second by number of threads, from a table in GB/s."""
        table = self.content.get(key) or {}
        if not isinstance(table, dict) or not all(str(threads).isdecimal() for threads in table):
            raise refused(self.path, f"has no table of threads in {self.prefix + key!r}")
        return {int(threads): self._checked(rate, key, 0.01, 1e4) * GIGA for threads, rate in table.items()}

    def _checked(self, value: Any, key: str, low: float, high: float) -> float:
        # bool is an int to Python, and JSON as Python reads it has NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise refused(self.path, f"has no number in {self.prefix + key!r}")
        if not low <= value <= high:
            raise refused(self.path, f"has {value!r} in {self.prefix + key!r}, which must be from {low:g} to {high:g}")
        return float(value)


def refused(path: Path, what: str) -> EngineError:
    """The error for a broken profile; `what` completes a sentence about it."""
    return EngineError(ErrorCode.INVALID_REQUEST, f"The profile {path} {what}: fix it or use another profile.")
