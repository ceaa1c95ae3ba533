"""The user's settings in one JSON file, written atomically and preserving unknown keys."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from PySide6.QtCore import QCoreApplication, QObject, Signal

from app.languages import LANGUAGES, SYSTEM
from app.services.background import LatestTask
from engine.common.config import CACHE_POLICIES, KV_PRECISIONS, CachePolicy, KvPrecision, SamplingParams
from engine.common.files import write_private
from engine.common.paths import config_dir

translate = QCoreApplication.translate

ThemeChoice = Literal["system", "light", "dark"]
ServedTo = Literal["pc", "key", "network"]

V = TypeVar("V")
T = TypeVar("T", bool, int, float, str, list[Any], dict[str, Any])

STARTER = "starter"
DEFAULT_FONT_PX = 14
SAVE_DELAY_MS = 400
DEFAULT_JOBS_AT_ONCE, MOST_JOBS_AT_ONCE = 2, 8
DEFAULT_SERVER_PORT = 8490
LEAST_CONTEXT = 512
"""Tokens: less holds no conversation."""
LEAST_BUDGET = 2**28
"""Bytes: less holds no model, and was not meant."""


class Kept(Generic[V]):
    """A setting: its key in the file, what holds without it, and what is made of a value there: None if it makes no
    sense."""

    def __init__(self, key: str, default: V, valid: Callable[[V], V | None] = lambda value: value) -> None:
        self._key, self._default, self._valid = key, default, valid

    def __get__(self, settings: Settings, _owner: type) -> V:
        value = settings.get(self._key, self._default)  # type: ignore[type-var]
        found = self._valid(value)
        return self._default if found is None else found

    def __set__(self, settings: Settings, value: V) -> None:
        settings.set(self._key, value)  # type: ignore[arg-type]


class KeptNumber:
    """A whole number that may be left to the engine, which is None; in the file it is less than `least` then."""

    def __init__(self, key: str, least: int) -> None:
        self._key, self._least = key, least

    def __get__(self, settings: Settings, _owner: type) -> int | None:
        value = settings.get(self._key, 0)
        return value if value >= self._least else None

    def __set__(self, settings: Settings, value: int | None) -> None:
        settings.set(self._key, value or 0)


def _one_of(*values: V) -> Callable[[V], V | None]:
    return lambda value: value if value in values else None


def _as_precision(value: str) -> str | None:
    from engine.formats import PRECISIONS  # imported late: the window opens without it

    return value if value in PRECISIONS else None


class Settings(QObject):
    """The settings file as properties.

    A value of the wrong type counts as absent, keys of other versions are kept, and an invalid file is renamed and
    reported in `notice`.  Changes are written together after a short delay; `save()` writes at once.

    Signals:
        changed(str): the key with a new value.
        save_failed(str): a sentence for the user; the settings are kept until the window closes.
    """

    changed = Signal(str)
    save_failed = Signal(str)

    def __init__(self, path: Path | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._path = path or config_dir() / "settings.json"
        self.notice = ""
        """One sentence if the file was unreadable; empty otherwise."""
        self._values = self._read()
        self._unsaved = False
        self._saving = LatestTask(self, after_ms=SAVE_DELAY_MS)

    @property
    def path(self) -> Path:
        return self._path

    # --- the settings -----------------------------------------------------------------------------

    theme = Kept[ThemeChoice]("theme", "system", _one_of("system", "light", "dark"))
    font_px = Kept[int]("font_px", DEFAULT_FONT_PX, lambda px: max(11, min(24, px)))
    """Size of body text in device-independent pixels."""
    language = Kept[str]("language", SYSTEM, _one_of(SYSTEM, *LANGUAGES))
    language_told = Kept[str]("language_told", "")
    """The system's language of which it was said that there is no translation."""
    default_model = Kept[str]("default_model", STARTER, lambda model: model or STARTER)
    """Loaded at start: `starter`, a library name or a checkpoint directory."""
    chat_model = Kept[str]("chat_model", "")
    """What answers new chats, where that is a server elsewhere (`endpoint:NAME/MODEL`); empty: the model here."""
    tray = Kept[bool]("tray", default=False)
    """Whether there is an icon in the desktop's tray."""
    stays_in_tray = Kept[bool]("stays_in_tray", default=False)
    """Whether the program goes on there when its window is closed."""
    window_geometry = Kept[str]("window_geometry", "")
    """`QWidget.saveGeometry()` in base64; empty before the first close."""
    jobs_at_once = Kept[int]("jobs_at_once", DEFAULT_JOBS_AT_ONCE, lambda jobs: max(1, min(MOST_JOBS_AT_ONCE, jobs)))
    """How many batch jobs share the engine; others wait for their turn."""

    # How models run, as the fields of `EngineConfig`.
    device = Kept[str]("device", "auto", lambda device: device or "auto")
    precision = Kept[str]("precision", "auto", _as_precision)
    threads = KeptNumber("threads", 1)
    vram_bytes = KeptNumber("vram_bytes", LEAST_BUDGET)
    ram_bytes = KeptNumber("ram_bytes", LEAST_BUDGET)
    cache_policy = Kept[CachePolicy]("cache_policy", "auto", _one_of(*CACHE_POLICIES))
    kv_precision = Kept[KvPrecision]("kv_precision", "auto", _one_of(*KV_PRECISIONS))
    speculation = Kept[bool]("speculation", default=True)
    """Whether the engine may guess coming tokens; answers stay the same."""
    idle_minutes = Kept[int]("idle_minutes", 0, lambda minutes: max(0, minutes))
    """The window's model is put aside once it is unused for so long; 0 keeps it."""

    # What other programs may use.
    serves_others = Kept[bool]("serve_others", default=False)
    serves = Kept[ServedTo]("serve_to", "pc", _one_of(*get_args(ServedTo)))
    """Which programs may: those of this PC, those that know the key, or those of other PCs that know it."""
    server_port = Kept[int]("serve_port", DEFAULT_SERVER_PORT, lambda port: port if 1024 <= port < 65536 else None)
    others_idle_minutes = Kept[int]("serve_idle_minutes", 10, lambda minutes: max(0, minutes))
    """As `idle_minutes`, for a model that a program asked for by name."""
    gives_way = Kept[bool]("serve_gives_way", default=False)
    """Whether the window's model makes room for one that a program asks for, where both do not fit."""

    @property
    def last_model(self) -> str:
        """What was to answer in the chat that was on screen last, as `chat_model`."""
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
        """The context that a model, given by its path, is loaded with, in tokens; None is its own limit."""
        value = self.get("context_tokens", {}).get(model)
        return value if type(value) is int and value >= LEAST_CONTEXT else None

    def set_context_of(self, model: str, tokens: int | None) -> None:
        """Holds when the model is loaded the next time."""
        rest = {path: value for path, value in self.get("context_tokens", {}).items() if path != model}
        self.set("context_tokens", {**rest, model: tokens} if tokens is not None else rest)

    # --- any setting ------------------------------------------------------------------------------

    def get(self, key: str, default: T) -> T:
        """The value of `key` if it is of `default`'s type, else `default`."""
        value = self._values.get(key)
        return value if type(value) is type(default) else default

    def set(self, key: str, value: bool | int | float | str | list[Any] | dict[str, Any]) -> None:
        """Stores a JSON value under `key`."""
        if self._values.get(key) != value:
            self._values[key] = value
            self._unsaved = True
            self._save_soon()
            self.changed.emit(key)

    # --- the file ---------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes changes now, if there are any."""
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
        return json.dumps(self._values, indent=2, ensure_ascii=False) + "\n"

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(values, dict):
                return values
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.notice = translate(
                "Settings", "The settings in {0} could not be read ({1}), so the defaults are used."
            ).format(self._path, error.strerror or error)
            return {}
        except ValueError:
            pass
        self._keep_damaged()
        return {}

    def _keep_damaged(self) -> None:
        moved = self._path.with_name(f"{self._path.name}.broken-{time.strftime('%Y-%m-%d-%H%M%S')}")
        try:
            self._path.replace(moved)
        except OSError:
            moved = self._path
        self.notice = translate(
            "Settings", "The settings file was damaged; it is kept as {0}, and the defaults are used."
        ).format(moved)
