"""Where Switchyard keeps things: the platform's per-user folders, or all of it under `SWITCHYARD_HOME`."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_APP = "Switchyard"


def _base(platform_folder: str, name: str) -> Path:
    home = os.environ.get("SWITCHYARD_HOME")
    return Path(home).expanduser() / name if home else Path(platform_folder)


def config_dir() -> Path:
    """Settings.  Not created here: whoever writes first makes it."""
    return _base(platformdirs.user_config_dir(_APP, appauthor=False), "config")


def data_dir() -> Path:
    """Chats and everything a user would miss."""
    return _base(platformdirs.user_data_dir(_APP, appauthor=False), "data")


def models_dir() -> Path:
    """The model library: one folder per model."""
    return data_dir() / "models"


def cache_dir() -> Path:
    """What can be made again: downloads, measurements."""
    return _base(platformdirs.user_cache_dir(_APP, appauthor=False), "cache")


def log_dir() -> Path:
    """Logs and crash reports; never prompts, answers or tokens."""
    return _base(platformdirs.user_log_dir(_APP, appauthor=False), "logs")


def resources_dir() -> Path:
    """Files shipped with the program (icons, themes, the starter's recipe)."""
    return Path(__file__).resolve().parent.parent / "resources"
