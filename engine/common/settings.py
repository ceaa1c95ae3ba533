"""The settings that people can change, of the window and of the engine; their file; and secrets in the keyring."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from engine.common.config import MODEL_CARD, EngineConfig, SamplingParams
from engine.common.falls import passed_over
from engine.common.paths import config_dir
from engine.common.schema import Choice, Number, Setting, Size, Switch, Text, settings_of
from engine.common.sizes import about

ThemeChoice = Literal["system", "light", "dark"]
ServedTo = Literal["pc", "key", "network"]

STARTER = "starter"
DEFAULT_SERVER_PORT = 8490
SYSTEM, ENGLISH = "system", "en"
LANGUAGES = {
    ENGLISH: "English",
    "de": "Deutsch",
    "es": "Español",
    "fr": "Français",
    "ja": "日本語",
    "zh_CN": "简体中文",
}
"""Each under its own name."""

APPEARANCE_CARD, TRAY_CARD, SERVER_CARD = "Appearance", "Quick question", "API server"
MONITOR_CARD, UPDATES_CARD = "Monitor", "Updates"


class WindowSettings:
    """What the window keeps.  An entry with a name is a row of the Settings page; the others are remembered."""

    theme = Setting[ThemeChoice](
        "system",
        Choice(get_args(ThemeChoice), {"system": "System", "light": "Light", "dark": "Dark"}),
        name="Theme",
        help="System follows the desktop's setting.",
        card=APPEARANCE_CARD,
    )
    language = Setting(
        SYSTEM,
        Choice((SYSTEM, *LANGUAGES), {SYSTEM: "System", **LANGUAGES}),
        name="Language",
        help="System is the language of this PC, or English.",
        card=APPEARANCE_CARD,
    )
    font_px = Setting(
        14,
        Number(11, 24, unit="px"),
        name="Text size",
        help="Of everything in this window.",
        card=APPEARANCE_CARD,
    )
    language_told = Setting("", Text())
    """The system's language of which it was said that there is no translation."""
    default_model = Setting(
        STARTER,
        Text(),
        name="Default model",
        help="Loaded when Switchyard starts.",
        card=MODEL_CARD,
        applies="load",
    )
    """`starter`, a library name or a checkpoint directory."""
    chat_model = Setting("", Text())
    """What answers new chats, where that is a server elsewhere (`endpoint:NAME/MODEL`); empty: the model here."""
    idle_minutes = Setting(
        0,
        Number(0, 10**6, common=(10, 30, 120, 0), unit="minutes", special="Never"),
        name="Free the memory after",
        help="If the model is not used for this long; the next question loads it again.",
        card=MODEL_CARD,
    )
    jobs_at_once = Setting(
        2,
        Number(1, 8),
        name="Batch jobs at once",
        help="They share each pass through the model; others wait for their turn.",
        card=MODEL_CARD,
    )
    tray = Setting(
        default=False,
        kind=Switch(),
        name="Icon in the tray",
        help="Click it to ask a question from anywhere, in a small window above the others.",
        card=TRAY_CARD,
    )
    stays_in_tray = Setting(
        default=False,
        kind=Switch(),
        name="Keep running when the window is closed",
        help="The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q.",
        card=TRAY_CARD,
    )
    memory_folded = Setting(default=False, kind=Switch())
    """Whether the sidebar shows one bar of the memory only."""
    window_geometry = Setting("", Text())
    """`QWidget.saveGeometry()` in base64; empty before the first close."""

    serves_others = Setting(
        default=False,
        kind=Switch(),
        name="Let apps use the models of this PC",
        card=SERVER_CARD,
        key="serve_others",
    )
    serves = Setting[ServedTo](
        "pc",
        Choice(get_args(ServedTo), {"pc": "This PC", "key": "This PC, with key", "network": "Network, with key"}),
        name="Who may use it",
        card=SERVER_CARD,
        key="serve_to",
    )
    server_port = Setting(
        DEFAULT_SERVER_PORT,
        Number(1024, 65535),
        name="Port",
        help="Choose another if a program on this PC already uses it.",
        card=SERVER_CARD,
        key="serve_port",
    )
    others_idle_minutes = Setting(
        10,
        Number(0, 10**6, common=(5, 10, 30, 120, 0), unit="minutes", special="Keep loaded"),
        name="Free them after",
        help="A model that a program asked for is freed once no program has used it for this long.",
        card=SERVER_CARD,
        key="serve_idle_minutes",
    )
    gives_way = Setting(
        default=False,
        kind=Switch(),
        name="My model makes room for them",
        help="Where both do not fit, yours is put aside, and loaded again for your next question.",
        card=SERVER_CARD,
        key="serve_gives_way",
    )
    record_sessions = Setting(
        default=True,
        kind=Switch(),
        name="Record sessions",
        help="Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this machine "
        "and take up to 512 MB; the oldest are deleted.",
        card=MONITOR_CARD,
    )
    monitor_details = Setting(default=False, kind=Switch())
    """Whether the Monitor shows its lanes and figures below the summary."""
    look_for_updates = Setting(
        default=False,
        kind=Switch(),
        name="Check for updates",
        help="Once a day, at the start. Nothing about you is sent, and nothing is downloaded without asking.",
        card=UPDATES_CARD,
    )


SCHEMAS: tuple[type, ...] = (EngineConfig, WindowSettings)
"""Whose entries are in the settings file."""


def kept_settings() -> dict[str, Setting[Any]]:
    """Every setting that the file may hold, by key: all of the window's, and those of the engine that have a name (the
    others are given for one run, or chosen for each model)."""
    return {
        setting.key: setting
        for schema in SCHEMAS
        for setting in settings_of(schema)
        if setting.name or schema is not EngineConfig
    }


# --- the file -------------------------------------------------------------------------------------

VERSION = 2


def _with_engine_words(values: dict[str, Any]) -> dict[str, Any]:
    """What the engine decides was 0, and speculative decoding on or off."""
    old: dict[str, Any] = {key: None for key in ("threads", "vram_bytes", "ram_bytes") if values.get(key) == 0}
    if isinstance(values.get("speculation"), bool):
        old["speculation"] = "auto" if values["speculation"] else "off"
    return values | old


MIGRATIONS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (_with_engine_words,)
"""The first one makes version 2 of version 1, and so on."""


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a settings file holds.

    Attributes:
        values: by key, unknown ones included: they may be another version's.
        odd: the keys whose values make no sense, which are as if not set.
    """

    values: dict[str, Any] = field(default_factory=dict)
    odd: tuple[str, ...] = ()

    def value(self, setting: Setting[Any]) -> Any:
        return value_in(self.values, setting)

    @property
    def problem(self) -> str:
        """One sentence; empty where everything makes sense."""
        return f"The settings file has values that make no sense ({', '.join(self.odd)})." if self.odd else ""


def settings_path() -> Path:
    return config_dir() / "settings.json"


def value_in(values: Mapping[str, Any], setting: Setting[Any]) -> Any:
    return setting.read(values[setting.key]) if setting.key in values else setting.default


def read_settings(path: Path) -> SettingsFile:
    """The file, as this version writes it.  One that is missing is empty.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SettingsFile()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    written = values.get("version")
    for migrate in MIGRATIONS[max(0, written - 1 if type(written) is int else 0) :]:
        values = migrate(values)
    known = kept_settings()
    return SettingsFile(
        values, tuple(key for key, value in values.items() if key in known and not known[key].makes_sense(value))
    )


def engine_settings(values: Mapping[str, Any], model: str) -> EngineConfig:
    kept = {each.key: value_in(values, each) for each in settings_of(EngineConfig) if each.name}
    return EngineConfig(model, **kept)


# --- secrets ----------------------------------------------------------------------------------------

_SERVICE = "Switchyard"


def ask_keyring(name: str) -> str:
    """What is kept under this name, or an empty string.  May wait for people who unlock it."""
    with passed_over("The keyring was not read"):  # there is none, it is locked, or no session to ask in
        import keyring

        return keyring.get_password(_SERVICE, name) or ""
    return ""


def tell_keyring(name: str, secret: str) -> None:
    """Keeps a secret, if there is a keyring: ask to know."""
    with passed_over("The keyring keeps nothing"):  # what its backends raise is not documented
        import keyring

        keyring.set_password(_SERVICE, name, secret)


def forget_in_keyring(name: str) -> None:
    with passed_over("The keyring forgets nothing"):
        import keyring

        keyring.delete_password(_SERVICE, name)


# --- what is said of them -------------------------------------------------------------------------


def said(setting: Setting[Any], value: Any) -> str:
    kind = setting.kind
    if value is None:
        return "automatic"
    if isinstance(kind, Switch):
        return "on" if value else "off"
    if isinstance(kind, Size):
        return about(value)
    if isinstance(kind, Number) and kind.unit == "minutes":
        return f"{value} minutes" if value else kind.special.lower()
    return str(value)


def _bounds(setting: Setting[Any]) -> str:
    kind = setting.kind
    if isinstance(kind, Choice):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, Number):
        return kind.words
    return {Switch: "on or off", Size: "a size such as 8GB"}.get(type(kind), "text")


_WHEN = {"now": "at once", "load": "when a model is loaded", "start": "at the next start"}
_BEGINS, _ENDS = "<!-- {} from python -m engine.common.settings -->", "<!-- end -->"


def _kept_table() -> str:
    lines = ["| setting | in the file | option | values (usual) | takes effect | |", "|---|---|---|---|---|---|"]
    for schema in SCHEMAS:
        for setting in settings_of(schema):
            if setting.name or setting.option:
                option, key = f"`{setting.option}`" if setting.option else "", f"`{setting.key}`"
                usual = "" if setting.is_private else f" ({said(setting, setting.default)})"
                key, when = (key, _WHEN[setting.applies]) if setting.name else ("", "for this run")
                words = setting.help or setting.words
                lines.append(f"| {setting.name} | {key} | {option} | {_bounds(setting)}{usual} | {when} | {words} |")
    return "\n".join(lines)


def _sampling_table() -> str:
    lines = ["| option | values | does |", "|---|---|---|"]
    for setting in settings_of(SamplingParams):
        option = f"{setting.option} {setting.metavar or ''}".strip()
        lines += [f"| `{option}` | {_bounds(setting)} | {setting.words} |"] if option else []
    return "\n".join(lines)


def with_tables(document: str) -> str:
    for name, table in (("settings", _kept_table()), ("sampling", _sampling_table())):
        begins = _BEGINS.format(name)
        before, _, rest = document.partition(begins)
        document = f"{before}{begins}\n\n{table}\n\n{_ENDS}{rest.partition(_ENDS)[2]}"
    return document


if __name__ == "__main__":
    document = Path("docs/command-line.md")
    document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
