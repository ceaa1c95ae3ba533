"""Where models lie: the folders that the user keeps models in, the standard one first."""

from __future__ import annotations

import json
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, write_private
from engine.common.foreign import parse_json, read_foreign
from engine.common.paths import config_dir, models_dir

_MOST_FOLDERS = 50
_MOST_BYTES = 2**20


def model_folders() -> tuple[Path, ...]:
    """The folders with the user's models; the first, `models_dir()`, takes new ones unless another is named.

    A folder that is not there now (an unplugged disk) stays in the list.
    """
    return tuple(dict.fromkeys((models_dir(), *_added())))


def add_model_folder(folder: Path) -> tuple[Path, ...]:
    """Adds a folder whose models are listed and used where they lie; returns all folders.

    Raises:
        EngineError: `INVALID_REQUEST` if it is no folder, lies inside one of the folders, or there are too many.
    """
    folder = Path(folder).expanduser().absolute()
    now = model_folders()
    if not folder.is_dir():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} is not a folder: check the path.")
    where = folder.resolve()
    for other in now:
        if where == other.resolve():
            return now
        if other.resolve() in where.parents:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} lies in {other}, which is a model folder already.")
    if len(now) >= _MOST_FOLDERS:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There are {len(now)} model folders already: drop one first.")
    _save((*_added(), folder))
    return model_folders()


def drop_model_folder(folder: Path) -> tuple[Path, ...]:
    """Takes a folder off the list, with nothing deleted; returns the folders that are left.

    Raises:
        EngineError: `INVALID_REQUEST` if it is not in the list, or is the standard one.
    """
    folder = Path(folder).expanduser().absolute()
    if folder == models_dir():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} is where new models go: it stays in the list.")
    added = _added()
    if folder not in added:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} is not a model folder.")
    _save(tuple(other for other in added if other != folder))
    return model_folders()


def _list_file() -> Path:
    return config_dir() / "model-folders.json"


def _added() -> tuple[Path, ...]:
    try:
        folders = parse_json(read_foreign(_list_file(), _MOST_BYTES))["folders"]
        paths = [Path(folder) for folder in folders if isinstance(folder, str) and "\0" not in folder]
    except (OSError, ValueError, LookupError, TypeError):
        return ()
    return tuple(path for path in paths if path.is_absolute())[:_MOST_FOLDERS]


def _save(folders: tuple[Path, ...]) -> None:
    text = json.dumps({"folders": [str(folder) for folder in folders]}, indent=2, ensure_ascii=False) + "\n"
    with disk_errors_explained(config_dir()):
        write_private(_list_file(), text)
