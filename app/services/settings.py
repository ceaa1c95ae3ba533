"""The user's settings in one JSON file, written atomically and preserving unknown keys."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from PySide6.QtCore import QCoreApplication, QObject, Signal

from app.services.background import LatestTask
from engine.common.config import CACHE_POLICIES, KV_PRECISIONS, CachePolicy, KvPrecision, SamplingParams
from engine.common.files import write_private
from engine.common.paths import config_dir

translate = QCoreApplication.translate

ThemeChoice = Literal["system", "light", "dark"]
ServedTo = Literal["pc", "key", "network"]

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

    # --- typed settings ---------------------------------------------------------------------------

    @property
    def theme(self) -> ThemeChoice:
        value = self._values.get("theme")
        return cast(ThemeChoice, value) if value in ("system", "light", "dark") else "system"

    @theme.setter
    def theme(self, value: ThemeChoice) -> None:
        self.set("theme", value)

    @property
    def font_px(self) -> int:
        """Size of body text in device-independent pixels."""
        return max(11, min(24, self.get("font_px", DEFAULT_FONT_PX)))

    @font_px.setter
    def font_px(self, value: int) -> None:
        self.set("font_px", value)

    @property
    def default_model(self) -> str:
        """Loaded at start: `starter`, a library name or a checkpoint directory."""
        return self.get("default_model", STARTER) or STARTER

    @default_model.setter
    def default_model(self, value: str) -> None:
        self.set("default_model", value)

    @property
    def chat_model(self) -> str:
        """What answers new chats, where that is a server elsewhere (`endpoint:NAME/MODEL`); empty: the model here."""
        return self.get("chat_model", "")

    @chat_model.setter
    def chat_model(self, value: str) -> None:
        self.set("chat_model", value)

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

    @property
    def tray(self) -> bool:
        """Whether there is an icon in the desktop's tray."""
        return self.get("tray", default=False)

    @tray.setter
    def tray(self, value: bool) -> None:
        self.set("tray", value)

    @property
    def stays_in_tray(self) -> bool:
        """Whether the program goes on there when its window is closed."""
        return self.get("stays_in_tray", default=False)

    @stays_in_tray.setter
    def stays_in_tray(self, value: bool) -> None:
        self.set("stays_in_tray", value)

    @property
    def threads(self) -> int | None:
        """CPU threads for computing; None lets the engine decide."""
        value = self.get("threads", 0)
        return value if value > 0 else None

    @threads.setter
    def threads(self, value: int | None) -> None:
        self.set("threads", value or 0)

    @property
    def speculation(self) -> bool:
        """Whether the engine may guess coming tokens; answers stay the same."""
        return self.get("speculation", default=True)

    @speculation.setter
    def speculation(self, value: bool) -> None:
        self.set("speculation", value)

    @property
    def kv_precision(self) -> KvPrecision:
        """How chats hold keys and values, as in `EngineConfig.kv_precision`."""
        value = self.get("kv_precision", "auto")
        return value if value in KV_PRECISIONS else "auto"

    @kv_precision.setter
    def kv_precision(self, value: KvPrecision) -> None:
        self.set("kv_precision", value)

    def context_of(self, model: str) -> int | None:
        """The context that a model, given by its path, is loaded with, in tokens; None is its own limit."""
        value = self.get("context_tokens", {}).get(model)
        return value if type(value) is int and value >= LEAST_CONTEXT else None

    def set_context_of(self, model: str, tokens: int | None) -> None:
        """Holds when the model is loaded the next time."""
        rest = {path: value for path, value in self.get("context_tokens", {}).items() if path != model}
        self.set("context_tokens", {**rest, model: tokens} if tokens is not None else rest)

    @property
    def jobs_at_once(self) -> int:
        """How many batch jobs share the engine; others wait for their turn."""
        return max(1, min(MOST_JOBS_AT_ONCE, self.get("jobs_at_once", DEFAULT_JOBS_AT_ONCE)))

    @jobs_at_once.setter
    def jobs_at_once(self, value: int) -> None:
        self.set("jobs_at_once", value)

    @property
    def serves_others(self) -> bool:
        """Whether other programs may use the model."""
        return self.get("serve_others", default=False)

    @serves_others.setter
    def serves_others(self, value: bool) -> None:
        self.set("serve_others", value)

    @property
    def serves(self) -> ServedTo:
        """Which programs may: those of this PC, those that know the key, or those of other PCs that know it."""
        value = self.get("serve_to", "")
        return cast(ServedTo, value) if value in get_args(ServedTo) else "pc"

    @serves.setter
    def serves(self, value: ServedTo) -> None:
        self.set("serve_to", value)

    @property
    def server_port(self) -> int:
        """Where they find it."""
        value = self.get("serve_port", DEFAULT_SERVER_PORT)
        return value if 1024 <= value < 65536 else DEFAULT_SERVER_PORT

    @server_port.setter
    def server_port(self, value: int) -> None:
        self.set("serve_port", value)

    @property
    def idle_minutes(self) -> int:
        """The window's model is put aside once it is unused for so long; 0 keeps it."""
        return max(0, self.get("idle_minutes", 0))

    @idle_minutes.setter
    def idle_minutes(self, value: int) -> None:
        self.set("idle_minutes", value)

    @property
    def others_idle_minutes(self) -> int:
        """As `idle_minutes`, for a model that a program asked for by name."""
        return max(0, self.get("serve_idle_minutes", 10))

    @others_idle_minutes.setter
    def others_idle_minutes(self, value: int) -> None:
        self.set("serve_idle_minutes", value)

    @property
    def gives_way(self) -> bool:
        """Whether the window's model makes room for one that a program asks for, where both do not fit."""
        return self.get("serve_gives_way", default=False)

    @gives_way.setter
    def gives_way(self, value: bool) -> None:
        self.set("serve_gives_way", value)

    @property
    def device(self) -> str:
        """Where models run, as in `EngineConfig.device`."""
        return self.get("device", "auto") or "auto"

    @device.setter
    def device(self, value: str) -> None:
        self.set("device", value)

    @property
    def precision(self) -> str:
        """Of the weights in memory, as in `EngineConfig.precision`."""
        from engine.formats import PRECISIONS  # imported late: the window opens without it

        value = self.get("precision", "auto")
        return value if value in PRECISIONS else "auto"

    @precision.setter
    def precision(self, value: str) -> None:
        self.set("precision", value)

    @property
    def cache_policy(self) -> CachePolicy:
        """Which experts stay on the card, as in `EngineConfig.cache_policy`."""
        value = self.get("cache_policy", "auto")
        return value if value in CACHE_POLICIES else "auto"

    @cache_policy.setter
    def cache_policy(self, value: CachePolicy) -> None:
        self.set("cache_policy", value)

    @property
    def vram_bytes(self) -> int | None:
        """The most of the card's memory that a model may take; None is all that is free."""
        return self._budget("vram_bytes")

    @vram_bytes.setter
    def vram_bytes(self, value: int | None) -> None:
        self.set("vram_bytes", value or 0)

    @property
    def ram_bytes(self) -> int | None:
        """As `vram_bytes`, of the machine's."""
        return self._budget("ram_bytes")

    @ram_bytes.setter
    def ram_bytes(self, value: int | None) -> None:
        self.set("ram_bytes", value or 0)

    def _budget(self, key: str) -> int | None:
        value = self.get(key, 0)
        return value if value >= LEAST_BUDGET else None

    @property
    def window_geometry(self) -> str:
        """`QWidget.saveGeometry()` in base64; empty before the first close."""
        return self.get("window_geometry", "")

    @window_geometry.setter
    def window_geometry(self, value: str) -> None:
        self.set("window_geometry", value)

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
