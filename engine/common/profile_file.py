"""Profiles: JSON files of machines and models, shipped with the program or written by the user.

Values are checked: an impossible number is an error with a message, and never used.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import parse_json, read_untrusted, reason

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
