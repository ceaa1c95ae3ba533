"""Resolves `M` (`starter`, the name of a model on this machine, or a path), and checks names of new models."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from engine.checkpoint.config_file import CONFIG_NAME
from engine.checkpoint.gguf import SUFFIX, gguf_at, stem_of
from engine.checkpoint.model_directories import OWN, Found, find_models, name_at
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import models_dir

STARTER_NAME = "starter"

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""`ORG/NAME` of a model on a hub."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


def starter_folder() -> Path:
    return models_dir() / STARTER_NAME


def resolve(model: str) -> Path:
    """The checkpoint that `model` means: `starter`, a name, or the path of a directory or a GGUF file.

    Names are those of the library, then those of models in other folders and in other programs' stores, which are
    looked for only if nothing else is meant.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `MODEL_UNSUPPORTED` (a hub id); `CHECKPOINT_UNSAFE` (a pickle).
    """
    if model.strip() == "":
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"No model was named: use `{STARTER_NAME}`, a library name or a folder."
        )
    is_its_path = Path(model).parent == models_dir()  # kept as it is listed, even where a link leads to the library
    named = in_library(Path(model).name if is_its_path else model)
    if named is not None:
        return named
    if model == STARTER_NAME:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND,
            "The starter model is not on this machine yet: run `switchyard models pull starter`.",
        )
    return _resolve_path(model)


def name_of(path: Path) -> str:
    """What to call the checkpoint at a path: the name of its folder, or of a GGUF file without its ending, unless the
    program in whose store it lies has another."""
    return name_at(path) or (path.name if path.is_dir() else stem_of(path))


def check_new_name(name: str) -> None:
    """Checks that a model may be called `name`: a valid file name on every platform, neither taken nor reserved.

    Raises:
        EngineError: `INVALID_REQUEST`.
    """
    if not _NAME.fullmatch(name) or is_windows_device(name):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{name!r} is not a valid model name: use up to 100 letters, digits, dots, dashes and underscores.",
        )
    if name.casefold() == STARTER_NAME:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"The name {STARTER_NAME!r} is reserved: choose another (--name).")
    if models_dir().is_dir() and name.casefold() in {entry.name.casefold() for entry in models_dir().iterdir()}:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The library already has a model called {name!r}: choose another name (--name), or remove that one first.",
        )


def folder_name(name: str) -> str:
    """A name as one that a new model may have: other programs' have slashes, colons and spaces."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:90].rstrip("-.") or "model"
    return f"model-{plain}" if plain.casefold() == STARTER_NAME or is_windows_device(plain) else plain


def is_windows_device(name: str) -> bool:
    """Whether Windows takes a file name, whatever its ending, for one of its devices."""
    return unicodedata.normalize("NFKC", name.split(".")[0]).rstrip(" ").casefold() in _WINDOWS_DEVICES


def in_library(name: str) -> Path | None:
    """The library's folder of that name, if it is a plain name and exists."""
    if not _NAME.fullmatch(name):
        return None
    folder = models_dir() / name
    # On a file system that ignores case, one model must not have two names.
    try:
        return folder if folder.is_dir() and name in {entry.name for entry in models_dir().iterdir()} else None
    except OSError:
        return None


def find_named(name: str) -> Found | None:
    """The model of that name, wherever on this machine it lies; a name that differs only by case will do."""
    if Path(name).is_absolute() or name.startswith((".", "~")):
        return None
    folder = in_library(name)
    if folder is not None:
        return Found(name, folder, OWN)
    found, _ = find_models()
    same = [model for model in found if model.name.casefold() == name.casefold()]
    return next((model for model in same if model.name == name), None) or next(iter(same), None)


def not_in_library(name: str) -> EngineError:
    return EngineError(
        ErrorCode.MODEL_NOT_FOUND,
        f"There is no model called {name!r} in the library: `switchyard models list` shows what there is, "
        "`switchyard models import PATH` adds one.",
    )


def is_path_like(model: str) -> bool:
    return any(character in model for character in "/\\~") or model in (".", "..") or Path(model).exists()


def _resolve_path(model: str) -> Path:
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"{model!r} is not a usable path ({error}).") from error
    if not (is_dir or is_file) and (found := find_named(model)) is not None:
        return found.path
    if not (is_dir or is_file) and path.exists():
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"{model} is neither a file nor a folder: give one with a model.")
    suffix = path.suffix.lower()
    if is_dir:
        if not (path / CONFIG_NAME).is_file() and gguf_at(path) is None:
            raise EngineError(
                ErrorCode.MODEL_NOT_FOUND,
                f"{path} has no {CONFIG_NAME}, so it is not a model: give the folder with "
                f"{CONFIG_NAME} and the safetensors files, or a GGUF file.",
            )
        return path.resolve()
    if suffix == SUFFIX:
        if not is_file:
            raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"There is no file {model}: check the path.")
        # Not where a link points: in a hub's cache that is a file without a name.
        return path.parent.resolve() / (gguf_at(path) or path).name
    if is_file and suffix in _PICKLES:
        raise EngineError(
            ErrorCode.CHECKPOINT_UNSAFE,
            f"{model} is a pickle file, which can run code when opened, so Switchyard never loads one: "
            "use the model's safetensors version.",
        )
    if is_file and gguf_at(path) is not None:
        return path.parent.resolve() / path.name
    if is_file:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{model} is a file: give the folder with it and its {CONFIG_NAME}, or a GGUF file.",
        )
    if HUB_ID.fullmatch(model):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"There is no folder {model}; if it is a model on the Hugging Face hub, `switchyard models pull {model}` "
            "downloads it.",
        )
    if is_path_like(model):
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"There is no folder {model}: check the path.")
    raise not_in_library(model)
