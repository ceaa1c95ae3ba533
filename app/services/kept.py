"""Texts and sampling settings that people keep under a name, each kind in one small file of the data folder.

A file that cannot be read is set aside and told of; what is kept from then on goes into a new one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from PySide6.QtCore import QCoreApplication, QObject, Signal

from app.services.background import TaskQueue
from app.services.chat_store.records import clean_text, sampling_from_dict
from engine.common.config import SamplingParams
from engine.common.files import write_private
from engine.common.model_info import ModelInfo
from engine.common.paths import data_dir
from engine.common.untrusted import parse_json, read_untrusted

ANSWER_TOKENS = 1024
"""Longest answer, unless the chat says otherwise."""
THINKING_TOKENS = 8192
"""The same of a model that thinks before it answers, which counts as well."""


class Preset(Enum):
    """Named sampling settings, all with a mild repetition penalty.  Values are in saved chats: never change one."""

    PRECISE = SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1, max_tokens=ANSWER_TOKENS)
    BALANCED = SamplingParams(temperature=0.4, top_p=0.95, repetition_penalty=1.1, max_tokens=ANSWER_TOKENS)
    CREATIVE = SamplingParams(temperature=0.7, top_p=0.95, min_p=0.05, repetition_penalty=1.1, max_tokens=ANSWER_TOKENS)

    def beside(self, own: SamplingParams) -> SamplingParams:
        """The preset with the loop guard and the longest answer of a model's own sampling, which it needs in every
        style."""
        return replace(
            self.value,
            max_tokens=own.max_tokens,
            dry_multiplier=own.dry_multiplier,
            dry_base=own.dry_base,
            dry_allowed_length=own.dry_allowed_length,
            dry_range=own.dry_range,
            dry_breakers=own.dry_breakers,
        )


def own_sampling(model: ModelInfo | None) -> SamplingParams:
    """What a model's makers suggest.

    Balanced if no model is known, or if none is suggested: greedy answers of small models loop.
    """
    suggested = SamplingParams()
    if model is not None and model.path:
        from engine.checkpoint.profile import suggested_sampling  # imported late: it is slow to load

        suggested = suggested_sampling(Path(model.path))
    sampling = Preset.BALANCED.value if suggested.temperature == 0 else suggested
    return replace(sampling, max_tokens=THINKING_TOKENS if model is not None and model.thinks else ANSWER_TOKENS)


def suggests_nothing(own: SamplingParams) -> bool:
    """Whether a model's own sampling is ours, because its makers suggest none."""
    return replace(own, max_tokens=ANSWER_TOKENS) == Preset.BALANCED.value


def preset_of(sampling: SamplingParams, own: SamplingParams) -> Preset | None:
    return next((preset for preset in Preset if sampling in (preset.value, preset.beside(own))), None)


translate = QCoreApplication.translate

T = TypeVar("T")

LARGEST = 16 * 2**20
LONGEST_NAME = 80
_VARIABLE = re.compile(r"\{\{\s*([^{}\n]*?\S)\s*\}\}")


def variables(text: str) -> tuple[str, ...]:
    """The names between double braces, in their order, each once."""
    return tuple(dict.fromkeys(_VARIABLE.findall(text)))


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with these values; a variable without one stays as it is.  Braces in values mean nothing."""
    return _VARIABLE.sub(lambda match: values.get(match[1], match[0]), text)


def name_for(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 40 else f"{words[:39].rstrip()}…"


@dataclass(frozen=True, slots=True)
class Named(Generic[T]):
    name: str
    value: T


class Kept(QObject, Generic[T]):
    """A list of named values, ordered by name; names differ in more than capitals.

    Signals:
        changed: `entries` is another.
        trouble: one sentence: the file cannot be read or written.  What was changed is in memory still.
    """

    changed = Signal()
    trouble = Signal(str)

    def __init__(
        self,
        file: str,
        to_json: Callable[[T], Any],
        from_json: Callable[[Any], T | None],
        parent: QObject | None = None,
        *,
        path: Path | None = None,
    ) -> None:
        super().__init__(parent)
        self._path = path or data_dir() / file
        self._to_json, self._from_json = to_json, from_json
        self._entries: dict[str, Named[T]] = {}
        self._is_read = False
        self._doing = TaskQueue(self)
        self._doing.add(self._read, self._on_read, self._on_unreadable)

    @property
    def entries(self) -> tuple[Named[T], ...]:
        return tuple(sorted(self._entries.values(), key=lambda entry: entry.name.casefold()))

    def find(self, name: str) -> Named[T] | None:
        return self._entries.get(name.casefold())

    def put(self, name: str, value: T, *, instead_of: str = "") -> None:
        name = self.clean_name(name)
        if not name:
            return
        self._entries.pop(instead_of.casefold(), None)
        self._entries[name.casefold()] = Named(name, value)
        self._write()

    def remove(self, name: str) -> None:
        if self._entries.pop(name.casefold(), None) is not None:
            self._write()

    @staticmethod
    def clean_name(name: str) -> str:
        return " ".join(clean_text(name).split())[:LONGEST_NAME]

    def close(self) -> None:
        self._doing.close()

    # --- the file ---

    def _read(self) -> list[Named[T]]:
        try:
            raw = parse_json(read_untrusted(self._path, LARGEST))
        except FileNotFoundError:
            return []
        except ValueError as error:
            kept_as = self._path.with_name(f"{self._path.name}.broken-{time.strftime('%Y-%m-%d-%H%M%S')}")
            self._path.replace(kept_as)
            raise _DamagedError(kept_as) from error
        found: list[Named[T]] = []
        entries = raw.get("entries") if isinstance(raw, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("name"), str):
                value = self._from_json(entry.get("value"))
                if value is not None and self.clean_name(entry["name"]):
                    found.append(Named(self.clean_name(entry["name"]), value))
        return found

    def _on_read(self, found: list[Named[T]]) -> None:
        self._is_read = True
        newer = self._entries
        self._entries = {entry.name.casefold(): entry for entry in found} | newer
        if newer:
            self._write()
        else:
            self.changed.emit()

    def _on_unreadable(self, error: Exception) -> None:
        if isinstance(error, _DamagedError):
            self._on_read([])
            words = translate("Kept", "{0} was damaged; it is kept as {1}, and a new one is begun.")
            self.trouble.emit(words.format(self._path.name, error.kept_as))
            return
        # Not written either: what is in the file may still be good.
        words = translate("Kept", "{0} could not be read ({1}): what you keep now is lost when the window closes.")
        self.trouble.emit(words.format(self._path, getattr(error, "strerror", None) or error))

    def _write(self) -> None:
        self.changed.emit()
        if not self._is_read:
            return
        entries = [{"name": entry.name, "value": self._to_json(entry.value)} for entry in self.entries]
        text = json.dumps({"version": 1, "entries": entries}, ensure_ascii=False, indent=1) + "\n"
        self._doing.add(lambda: write_private(self._path, text), failed=self._on_not_written)

    def _on_not_written(self, error: Exception) -> None:
        words = translate("Kept", "{0} could not be saved ({1}); free some space or check its permissions.")
        self.trouble.emit(words.format(self._path, getattr(error, "strerror", None) or error))


class _DamagedError(Exception):
    def __init__(self, kept_as: Path) -> None:
        super().__init__()
        self.kept_as = kept_as


class SavedPrompts(Kept[str]):
    def __init__(self, parent: QObject | None = None, *, path: Path | None = None) -> None:
        super().__init__("prompts.json", lambda text: text, _prompt, parent, path=path)


def _prompt(value: Any) -> str | None:
    return clean_text(value) if isinstance(value, str) and value.strip() else None


class SavedPresets(Kept[SamplingParams]):
    def __init__(self, parent: QObject | None = None, *, path: Path | None = None) -> None:
        super().__init__("presets.json", _fields, sampling_from_dict, parent, path=path)


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(sampling)
