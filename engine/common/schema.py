"""What a setting is: its kind, its default, its words, and where it can be set.

A setting is one entry in a class: `EngineConfig`, `SamplingParams` (engine/common/config.py) or `WindowSettings`
(engine/common/settings.py).  The command line's options, the settings file, the rows of the Settings page, what
`switchyard doctor` lists and the table of docs/command-line.md are made from the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, overload

V = TypeVar("V")

Applies = Literal["now", "load", "start"]
"""When a change takes effect: at once, when a model is loaded the next time, when the program starts."""


@dataclass(frozen=True, slots=True)
class Switch:
    def read(self, value: object) -> bool | None:
        """The value that JSON means; None if it means none."""
        return value if isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several texts.

    Attributes:
        values: all of them.
        names: what the window calls them; one without a name is called as it is.
        others: whether a text that is not among them is accepted as well.
    """

    values: Sequence[str]
    names: Mapping[str, str] = field(default_factory=dict)
    others: Callable[[str], bool] | None = None

    def read(self, value: object) -> str | None:
        known = isinstance(value, str) and (value in self.values or (self.others is not None and self.others(value)))
        return cast("str", value) if known else None


@dataclass(frozen=True, slots=True)
class Number:
    """A number within bounds.

    Attributes:
        allowed: the bounds in words, where they need others than "between LEAST and MOST".
        above, below: the bounds themselves are excluded.
        whole: without decimals.
        step: of a field's arrows.
        common: the usual values, of which the window offers a list.
        unit: what is counted.
        special: what the window calls the least value, where that means something else.
    """

    least: float = 0
    most: float = math.inf
    allowed: str = ""
    below: bool = False
    whole: bool = True
    step: float = 1
    common: tuple[int, ...] = ()
    unit: Literal["", "px", "minutes", "bytes"] = ""
    special: str = ""

    def holds(self, value: float) -> bool:
        try:
            is_finite = math.isfinite(value)
        except OverflowError:  # a whole number that no float can hold
            return False
        return is_finite and self.least <= value <= self.most and not (self.below and value == self.most)

    @property
    def words(self) -> str:
        return self.allowed or (
            f"{self.least} or more" if self.most == math.inf else f"between {self.least} and {self.most}"
        )

    def read(self, value: object) -> float | None:
        kinds = (int,) if self.whole else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool) and self.holds(cast("float", value))
        return cast("float", value) if good else None


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of memory, or all that is free.

    Attributes:
        least: fewer are a mistake.
    """

    least: int = 1

    def read(self, value: object) -> int | None:
        return value if type(value) is int and value >= self.least else None


@dataclass(frozen=True, slots=True)
class Text:
    """Any text.  What people type, or the names of their models and folders, so that no report contains it."""

    def read(self, value: object) -> str | None:
        return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Texts:
    r"""Several texts; the option may be repeated.

    Attributes:
        escapes: whether `\n` and `\t` in the option mean the characters, which a shell cannot easily give.
    """

    escapes: bool = False

    def read(self, value: object) -> tuple[str, ...] | None:
        are = isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value)
        return tuple(cast("Sequence[str]", value)) if are else None


Kind = Switch | Choice | Number | Size | Text | Texts


class Holder(Protocol):
    """What holds values of settings, by key."""

    def value(self, setting: Setting[V]) -> V: ...
    def set(self, key: str, value: Any) -> None: ...


@dataclass(eq=False)
class Setting(Generic[V]):
    """One setting; as an attribute of a `Holder`'s class it reads and writes the holder's value.

    Attributes:
        default: what holds where nothing is set.
        kind: what it may be.
        name: of its row on the Settings page; without one it has none.
        help: the row's explanation, a sentence or two.
        card: the card that the row is on.
        applies: when a change takes effect.
        option: of the command line, such as `--threads`.
        words: help of the option; the row's help if empty.
        metavar: stands for the option's value.
        group: heading of the option in `--help`.
        key: in the settings file; the attribute's name if it is not given.
    """

    default: V
    kind: Kind
    name: str = ""
    help: str = ""
    card: str = ""
    applies: Applies = "now"
    option: str = ""
    words: str = ""
    metavar: str | None = None
    group: str = ""
    key: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = self.key or name

    @overload
    def __get__(self, holder: None, owner: type) -> Setting[V]: ...
    @overload
    def __get__(self, holder: Holder, owner: type) -> V: ...
    def __get__(self, holder: Holder | None, owner: type) -> Setting[V] | V:
        return self if holder is None else holder.value(self)

    def __set__(self, holder: Holder, value: V) -> None:
        holder.set(self.key, value)

    def makes_sense(self, stored: object) -> bool:
        return self.kind.read(stored) is not None or (stored is None and self.default is None)

    def read(self, stored: object) -> V:
        """Its value from JSON; a number out of bounds is held within them, and anything else that makes no sense is as
        if it were not set."""
        found = self.kind.read(stored)
        if found is None and isinstance(self.kind, Number) and type(stored) is int and self.default is not None:
            found = max(self.kind.least, min(self.kind.most, stored))
        return self.default if found is None else cast("V", found)

    @property
    def said(self) -> str:
        """Its explanation in words, for the command line and the documents."""
        return self.words or self.help

    @property
    def is_private(self) -> bool:
        """Whether its value may name what is the user's own."""
        return isinstance(self.kind, Text | Texts)


def entry(default: V, kind: Kind, **words: Any) -> V:
    """A dataclass's field that is a setting; `words`: the other attributes of `Setting`."""
    made: V = field(default=default, metadata={"setting": Setting(default, kind, **words)})
    return made


@cache
def settings_of(owner: type) -> tuple[Setting[Any], ...]:
    """The entries of a class, in order."""
    if not hasattr(owner, "__dataclass_fields__"):
        return tuple(value for value in vars(owner).values() if isinstance(value, Setting))
    found = []
    for each in dataclass_fields(owner):
        setting = each.metadata.get("setting")
        if setting is not None:
            setting.key = setting.key or each.name
            found.append(setting)
    return tuple(found)
