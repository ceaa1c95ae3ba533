"""Where Switchyard keeps things: the platform's per-user folders, or all of it under `SWITCHYARD_HOME`."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import platformdirs

_APP = "Switchyard"

PREPARED_VARIABLE = "SWITCHYARD_PREPARED"
"""Of the environment: the folder of prepared weights, if not the one in the data folder."""


def _base(platform_folder: str, name: str) -> Path:
    home = os.environ.get("SWITCHYARD_HOME")
    return Path(home).expanduser() / name if home else Path(platform_folder)


def config_dir() -> Path:
    """Settings.  Not created here but by the first write."""
    return _base(platformdirs.user_config_dir(_APP, appauthor=False), "config")


def standard_data_dir() -> Path:
    """Where `data_dir` is unless the user has chosen another folder."""
    return _base(platformdirs.user_data_dir(_APP, appauthor=False), "data")


def chosen_data_dir_file() -> Path:
    """One line of text: the data folder that the user has chosen; absent for the standard one."""
    return config_dir() / "data-folder.txt"


def chosen_data_dir() -> Path | None:
    """The data folder that the user has chosen; None for the standard one."""
    try:
        chosen = chosen_data_dir_file().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(chosen) if chosen else None


def data_dir() -> Path:
    """Chats and everything a user would miss."""
    return chosen_data_dir() or standard_data_dir()


def models_dir() -> Path:
    """The model library: one folder per model."""
    return data_dir() / "models"


def jobs_dir() -> Path:
    """Journals of batch jobs: what was answered of each."""
    return data_dir() / "jobs"


def sessions_dir() -> Path:
    """Recorded sessions: what ran when, and how long."""
    return data_dir() / "sessions"


def cache_dir() -> Path:
    """What can be made again: downloads, measurements."""
    return _base(platformdirs.user_cache_dir(_APP, appauthor=False), "cache")


def log_dir() -> Path:
    """Logs and crash reports; never prompts, answers or tokens."""
    return _base(platformdirs.user_log_dir(_APP, appauthor=False), "logs")


def own_dirs() -> tuple[Path, ...]:
    """Folders that must stay private; they need not exist."""
    return config_dir(), data_dir(), jobs_dir(), sessions_dir(), cache_dir(), log_dir()


def resources_dir() -> Path:
    """Files shipped with the program (icons, themes, the starter's recipe)."""
    return Path(__file__).resolve().parents[2] / "resources"


def python_module(module: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs one of our modules in a new process, and the extra environment variables it needs.

    From a checkout the new process needs the path of `engine` and `app`; once installed it must not have it, or
    everything in site-packages would come before the standard library.  `-P` keeps the working folder off the
    import path: a `torch.py` there must not be imported.
    """
    root = str(Path(__file__).resolve().parents[2])
    extra: dict[str, str] = {}
    if root not in {str(Path(sysconfig.get_path(key)).resolve()) for key in ("purelib", "platlib")}:
        inherited = os.environ.get("PYTHONPATH")
        extra["PYTHONPATH"] = os.pathsep.join([root, inherited] if inherited else [root])
    return [sys.executable, "-P", "-X", "utf8", "-m", module], extra


_NEEDED_VARIABLES = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "HOME", "USERPROFILE",
    "APPDATA", "SYSTEMROOT", "WINDIR", "TEMP", "TMP", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "TZ",
)  # fmt: skip
"""What Python needs to find itself, its packages and their libraries, and to tell the time as the computer does."""


def confined_module(module: str) -> tuple[list[str], dict[str, str]]:
    """`python_module` for what runs others' code: the command, and its whole environment.

    Keys, tokens and whatever else is in this process's environment are not in it.
    """
    command, extra = python_module(module)
    inherited = {name: os.environ[name] for name in _NEEDED_VARIABLES if name in os.environ}
    return command, {**inherited, **extra, "TOKENIZERS_PARALLELISM": "false"}
