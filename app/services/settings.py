"""The user's settings in one JSON file, written atomically and preserving unknown keys.

What each setting is stands in `engine.common.settings` and `engine.common.config`.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from PySide6.QtCore import QCoreApplication, QObject, Signal

from app.services.background import LatestTask
from engine.common.config import LEAST_CONTEXT, EngineConfig, SamplingParams
from engine.common.files import write_private
from engine.common.schema import Setting
from engine.common.settings import (
    VERSION,
    WindowSettings,
    engine_settings,
    read_settings,
    settings_path,
    value_in,
)

translate = QCoreApplication.translate

V = TypeVar("V")
T = TypeVar("T", bool, int, float, str, list[Any], dict[str, Any])

SAVE_DELAY_MS = 400


class Settings(WindowSettings, QObject):
    """The settings file as attributes.

    What makes no sense counts as absent, keys of other versions are kept, and an invalid file is renamed; `notice` says
    so.  Changes are written together after a short delay; `save()` writes at once.

    Signals:
        changed(str): the key with a new value.
        save_failed(str): a sentence for the user; the settings are kept until the window closes.
    """

    changed = Signal(str)
    save_failed = Signal(str)

    def __init__(self, path: Path | None = None, parent: QObject | None = None) -> None:
        QObject.__init__(self, parent)
        self._path = path or settings_path()
        self.notice = ""
        """One sentence if the file, or something in it, was unreadable; empty otherwise."""
        self._values = self._read()
        self._unsaved = False
        self._saving = LatestTask(self, after_ms=SAVE_DELAY_MS)

    @property
    def path(self) -> Path:
        return self._path

    def engine(self, model: str) -> EngineConfig:
        """The user's configuration for a model; the engine or its tuning decides what is left open."""
        return replace(engine_settings(self._values, model), context_tokens=self.context_of(model))

    @property
    def last_model(self) -> str:
        return self.get("last_model", self.chat_model)

    @last_model.setter
    def last_model(self, value: str) -> None:
        self.set("last_model", value)

    @property
    def default_sampling(self) -> SamplingParams | None:
        """What new chats begin with; None for the model's own."""
        from app.services.chat_store.records import sampling_from_dict  # imported late: a second start needs no chats

        return sampling_from_dict(self._values.get("default_sampling") or None)

    @default_sampling.setter
    def default_sampling(self, value: SamplingParams | None) -> None:
        self.set("default_sampling", {} if value is None else asdict(value))

    def context_of(self, model: str) -> int | None:
        value = self.get("context_tokens", {}).get(model)
        return value if type(value) is int and value >= LEAST_CONTEXT else None

    def set_context_of(self, model: str, tokens: int | None) -> None:
        rest = {path: value for path, value in self.get("context_tokens", {}).items() if path != model}
        self.set("context_tokens", {**rest, model: tokens} if tokens is not None else rest)

    # --- any setting ------------------------------------------------------------------------------

    def value(self, setting: Setting[V]) -> V:
        found: V = value_in(self._values, setting)
        return found

    def get(self, key: str, default: T) -> T:
        value = self._values.get(key)
        return value if type(value) is type(default) else default

    def set(self, key: str, value: bool | int | float | str | list[Any] | dict[str, Any] | None) -> None:
        """Stores a JSON value under `key`; None leaves a setting to the engine."""
        if self._values.get(key) != value:
            self._values[key] = value
            self._unsaved = True
            self._save_soon()
            self.changed.emit(key)

    # --- the file ---------------------------------------------------------------------------------

    def save(self) -> None:
        self._saving.close()
        if not self._unsaved:
            return
        try:
            write_private(self._path, self._text())
            self._unsaved = False
        except OSError as error:
            self._on_not_saved(error)

    def _save_soon(self) -> None:
        text = self._text()
        self._saving.ask(lambda: write_private(self._path, text), self._on_saved, self._on_not_saved)

    def _on_saved(self, _nothing: object) -> None:
        self._unsaved = False  # a change meanwhile starts another save, and this is not called then

    def _on_not_saved(self, error: Exception) -> None:
        self.save_failed.emit(
            translate(
                "Settings",
                "The settings could not be saved to {0} ({1}); free some space or check its permissions.",
            ).format(self._path, getattr(error, "strerror", None) or error)
        )

    def _text(self) -> str:
        return json.dumps(self._values | {"version": VERSION}, indent=2, ensure_ascii=False) + "\n"

    def _read(self) -> dict[str, Any]:
        try:
            found = read_settings(self._path)
        except OSError as error:
            self.notice = translate(
                "Settings", "The settings in {0} could not be read ({1}), so the defaults are used."
            ).format(self._path, error.strerror or error)
            return {}
        except ValueError:
            self._keep_damaged()
            return {}
        if found.odd:
            self.notice = translate(
                "Settings", "Some settings in {0} make no sense ({1}): the usual ones are used instead of these."
            ).format(self._path, ", ".join(found.odd))
        return found.values

    def _keep_damaged(self) -> None:
        moved = self._path.with_name(f"{self._path.name}.broken-{time.strftime('%Y-%m-%d-%H%M%S')}")
        try:
            self._path.replace(moved)
        except OSError:
            moved = self._path
        self.notice = translate(
            "Settings", "The settings file was damaged; it is kept as {0}, and the defaults are used."
        ).format(moved)
