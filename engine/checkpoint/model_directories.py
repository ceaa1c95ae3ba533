"""Where models lie: the user's model folders, and the stores of other programs, whose models are used in place.

What is found is only read. Stores are looked for where each program keeps them by default or by its own setting:

- the hub's library: `models--ORG--NAME/snapshots/COMMIT`, whose files are links to `blobs` (plain files on Windows);
- LM Studio and Jan: folders with GGUF files, `PUBLISHER/MODEL/FILE.gguf`; GPT4All: one folder of GGUF files;
- Ollama: `manifests/HOST/NAMESPACE/NAME/TAG`, whose model layer names a file in `blobs` that is a GGUF file by content.

A folder may be large, unreadable, on a network that does not answer, or linked into itself: each is searched in a
thread of its own, to a limited depth and number of entries, and whoever asks waits only so long.

Whether the disk that a model folder lies on is connected.

Of an unplugged disk only the place is left where it was mounted: an empty folder, or none. A library that began there
would lie on another disk, and be hidden when the right one comes back. So where each folder's disk was mounted is kept
beside the settings, and a folder that is empty or gone, and on another disk than before, is not used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import platformdirs

from engine.checkpoint.config_file import CONFIG_NAME, MAX_CONFIG_BYTES, TEXT_CLASS
from engine.checkpoint.embedding import MODULES
from engine.checkpoint.gguf import SUFFIX, all_parts, first_part, stem_of
from engine.checkpoint.manifest import MANIFEST_NAME
from engine.checkpoint.shards import PICKLE_SUFFIXES, is_beside_weights
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, holding, private_folder, write_private
from engine.common.paths import config_dir, models_dir
from engine.common.plain_text import plain_line
from engine.common.untrusted import parse_json, read_record, read_untrusted, reason

_MOST_BYTES = 2**20


def note_connected(folder: Path) -> None:
    """Remembers where the disk of a model folder is mounted, if anything is in it.  May wait for that disk."""
    noted, mount = _noted(), _mount_of(folder)
    if _is_filled(folder) and noted.get(str(folder)) != mount:
        with contextlib.suppress(OSError):
            private_folder(config_dir())
            write_private(_file(), json.dumps({**noted, str(folder): mount}, indent=2) + "\n")


def trouble_with(folder: Path) -> str:
    """Why a model folder is not used now, in a sentence; empty if nothing is wrong.  May wait for its disk.

    The library's own folder may be gone: it is made when it is needed.
    """
    if _is_filled(folder):
        return ""
    is_there, mount = folder.is_dir(), _noted().get(str(folder), "")
    if mount and mount != _mount_of(folder):
        state = "is empty" if is_there else "is not there"
        anew = "To begin anew without it, add the folder again"
        return f"The model folder {folder} {state}, and was on the disk at {mount}: connect that disk. {anew}."
    if not is_there and folder != models_dir():
        return f"The model folder {folder} is not there: connect its disk, or take the folder off the list."
    return ""


def check_connected(folder: Path) -> None:
    """Raises if something is wrong with a model folder.

    Raises:
        EngineError: `INVALID_REQUEST`.
    """
    if trouble := trouble_with(folder):
        raise EngineError(ErrorCode.INVALID_REQUEST, trouble)


@dataclass(frozen=True, slots=True)
class Room:
    """How much a model folder can still take.

    Attributes:
        free: bytes; None, and `trouble` says why in a sentence, if the folder is not used now.
        is_elsewhere: whether it is on another disk than the library's own folder.
    """

    folder: Path
    free: int | None
    trouble: str = ""
    is_elsewhere: bool = False


def rooms_of(folders: Sequence[Path], within_s: float = 2.0) -> tuple[Room, ...]:
    """The room in each of these folders; a disk that does not answer in time counts as away."""
    found: dict[Path, Room] = {}

    def look(folder: Path) -> None:
        trouble = trouble_with(folder)
        place = next((each for each in (folder, *folder.parents) if each.exists()), folder)  # it may not be made yet
        with contextlib.suppress(OSError):
            elsewhere = _mount_of(folder) != _mount_of(models_dir())
            found[folder] = Room(folder, None if trouble else shutil.disk_usage(place).free, trouble, elsewhere)

    threads = [threading.Thread(target=look, args=(folder,), daemon=True) for folder in folders]
    for thread in threads:
        thread.start()
    until = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return tuple(found.get(each) or Room(each, None, f"The disk of {each} does not answer.") for each in folders)


def _is_filled(folder: Path) -> bool:
    """Whether anything is in it; a folder that cannot be read is not empty."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _mount_of(folder: Path) -> str:
    """Where the disk of a folder is mounted, links followed; where the folder is gone, the disk of what is left."""
    try:
        place = folder.resolve()
    except (OSError, RuntimeError):  # a link to itself
        place = folder
    return str(next((each for each in (place, *place.parents) if os.path.ismount(each)), place))


def _file() -> Path:
    return config_dir() / "model-folder-disks.json"


def _noted() -> dict[str, str]:
    raw = read_record(_file(), _MOST_BYTES)
    return {folder: mount for folder, mount in raw.items() if isinstance(mount, str)}


OWN, FOLDER, HUB_CACHE = "switchyard", "folder", "hub cache"
LM_STUDIO, OLLAMA, JAN, GPT4ALL = "LM Studio", "Ollama", "Jan", "GPT4All"

WITHIN_S = 5.0
_LOOK_S = 0.05
_PATIENCE_S = 20.0
_MOST_FOLDERS = 50
_MOST_PATH_BYTES = 2**13
_DEEPEST = 6
_MOST_ENTRIES = 100_000
_SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors$")
NO_NAME = re.compile(r"model$|ggml-model\b", re.IGNORECASE)
"""What converters call a file whose model they do not know."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_WEIGHTS = (SUFFIX, ".safetensors", *PICKLE_SUFFIXES)
_SNAPSHOT = re.compile(r"[0-9a-f]{40}")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_ADAPTER = "application/vnd.ollama.image.adapter"


@dataclass(frozen=True, slots=True)
class Found:
    """A model that lies somewhere: `path` is what `resolve` gives, `origin` whose it is (see `LibraryEntry`)."""

    name: str
    path: Path
    origin: str


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    origin: str
    folder: Path

    @property
    def is_ours(self) -> bool:
        """Whether it is one of the user's model folders, which are missed when they are not there."""
        return self.origin in (OWN, FOLDER)


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
    if not folder.is_dir():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} is not a folder: check the path.")
    noted = _noted()
    if noted.pop(str(folder), None) is not None:  # it is meant as it is now, on whatever disk
        with contextlib.suppress(OSError):
            write_private(_file(), json.dumps(noted, indent=2) + "\n")
    with _changing():
        return _add(folder)


def take_model_folder(folder: Path) -> Path:
    """A folder that a model is about to come into: makes it a model folder if it is none, and creates it where only
    its last part is missing.  Returns its full path.

    Raises:
        EngineError: `INVALID_REQUEST` if its disk is not connected, it lies in another program's store, or as
            `add_model_folder`; the disk's.
    """
    folder = Path(folder).expanduser().absolute()
    if folder == models_dir() or folder in model_folders():
        check_connected(folder)
    if folder == models_dir():
        return folder
    if (owner := origin_of(folder / "model")) not in (OWN, FOLDER):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} belongs to {owner}: choose a folder of yours.")
    if not folder.parent.is_dir():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no folder {folder.parent}: check the path.")
    with disk_errors_explained(folder):
        folder.mkdir(exist_ok=True)
    if folder not in model_folders():
        add_model_folder(folder)
    return folder


def _add(folder: Path) -> tuple[Path, ...]:
    now = model_folders()
    for other in now:
        if folder.resolve() == other.resolve():
            return now
        if _is_in(folder, other):
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
    with _changing():
        added = _added()
        if folder not in added:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} is not a model folder.")
        _save(tuple(other for other in added if other != folder))
    return model_folders()


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    """The right to change the list: for moments only."""
    with disk_errors_explained(config_dir()):
        private_folder(config_dir())
        busy = "Another process changes the list of model folders: try again."
        with holding(config_dir() / "model-folders.lock", _PATIENCE_S, busy):
            yield


def _list_file() -> Path:
    return config_dir() / "model-folders.json"


def _added() -> tuple[Path, ...]:
    folders = read_record(_list_file(), _MOST_BYTES).get("folders")
    named = folders if isinstance(folders, list) else []
    paths = [Path(folder) for folder in named if isinstance(folder, str) and "\0" not in folder]
    return tuple(path for path in paths if path.is_absolute())[:_MOST_FOLDERS]


def _save(folders: tuple[Path, ...]) -> None:
    text = json.dumps({"folders": [str(folder) for folder in folders]}, indent=2) + "\n"  # names may be undecodable
    write_private(_list_file(), text)


def model_directories() -> list[ModelDirectory]:
    """All folders to look in, the library first.

    With `SWITCHYARD_FIND_MODELS=0` in the environment other programs' stores are not looked at.
    """
    own, *added = model_folders()
    found = [ModelDirectory(OWN, own), *(ModelDirectory(FOLDER, folder) for folder in added)]
    if os.environ.get("SWITCHYARD_FIND_MODELS") != "0":
        with contextlib.suppress(RuntimeError):  # no home
            found += _stores(Path.home())
    return list(dict.fromkeys(found))


def _stores(home: Path) -> Iterator[ModelDirectory]:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(os.environ.get("HF_HOME") or caches / "huggingface") / "hub"  # the hub's library reads these only once
    yield ModelDirectory(HUB_CACHE, Path(os.environ.get("HF_HUB_CACHE") or hub).expanduser())
    for folder in dict.fromkeys((*_lm_studio_pointer(home), home / ".lmstudio", home / ".cache" / "lm-studio")):
        yield ModelDirectory(LM_STUDIO, folder / "models")
        yield from _set_elsewhere(LM_STUDIO, folder / "settings.json", "downloadsFolder")
    if os.environ.get("OLLAMA_MODELS"):
        yield ModelDirectory(OLLAMA, Path(os.environ["OLLAMA_MODELS"]))
    yield ModelDirectory(OLLAMA, home / ".ollama" / "models")
    if sys.platform == "linux":  # where its service runs as a user of its own
        yield ModelDirectory(OLLAMA, Path("/usr/share/ollama/.ollama/models"))
    for folder in (
        Path(platformdirs.user_data_dir("Jan", appauthor=False, roaming=True)),
        Path(platformdirs.user_config_dir("Jan", appauthor=False, roaming=True)),
        Path(platformdirs.user_data_dir("jan.ai.app", appauthor=False, roaming=True)),
    ):
        yield ModelDirectory(JAN, folder / "data" / "llamacpp" / "models")
        yield ModelDirectory(JAN, folder / "data" / "models")
        for directory in _set_elsewhere(JAN, folder / "settings.json", "data_folder"):
            yield ModelDirectory(JAN, directory.folder / "llamacpp" / "models")
    yield ModelDirectory(JAN, home / "jan" / "models")
    yield ModelDirectory(GPT4ALL, Path(platformdirs.user_data_dir("nomic.ai", appauthor=False)) / "GPT4All")
    yield from _gpt4all_elsewhere(home)
    yield ModelDirectory(GPT4ALL, home / ".cache" / "gpt4all")


def _lm_studio_pointer(home: Path) -> Iterator[Path]:
    """Where LM Studio keeps everything, if the file says so that it and its tools look at first."""
    with contextlib.suppress(OSError, ValueError):
        folder = Path(read_untrusted(home / ".lmstudio-home-pointer", _MOST_PATH_BYTES).decode().strip())
        if folder.is_absolute() and "\0" not in str(folder):
            yield folder


def _gpt4all_elsewhere(home: Path) -> Iterator[ModelDirectory]:
    """The folder in GPT4All's settings, which Qt writes as INI: letters beyond ASCII are `\\x` and their code."""
    base = Path(os.environ.get("APPDATA") or home) if sys.platform == "win32" else home / ".config"
    with contextlib.suppress(OSError, ValueError):
        text = read_untrusted(base / "nomic.ai" / "GPT4All.ini", _MOST_BYTES).decode()
        found = re.search(r'^modelPath="?([^"\r\n]+)', text, re.MULTILINE)
        path = re.sub(r"\\x([0-9a-f]{1,4})", lambda code: chr(int(code[1], 16)), found[1]) if found else ""
        folder = Path(path.replace("\\\\", "\\"))
        path.encode()  # raises where no file can have that name
        if folder.is_absolute() and "\0" not in path:
            yield ModelDirectory(GPT4ALL, folder)


def _set_elsewhere(origin: str, settings: Path, key: str) -> Iterator[ModelDirectory]:
    named = read_record(settings, _MOST_BYTES).get(key)
    if isinstance(named, str) and Path(named).is_absolute() and "\0" not in named:
        yield ModelDirectory(origin, Path(named))


def origin_of(model: Path) -> str:
    """Whose a checkpoint is, by where it lies, links followed.

    What lies in a store is its program's, even if the store is in a model folder, or if stores are not looked at.
    """
    with contextlib.suppress(RuntimeError):  # no home
        for directory in _stores(Path.home()):
            if _is_in(model, directory.folder):
                return directory.origin
    is_ours = any(_is_in(model, folder) for folder in model_folders())
    return OWN if model.parent == models_dir() or (is_ours and (model / MANIFEST_NAME).is_file()) else FOLDER


def _is_in(model: Path, folder: Path) -> bool:
    try:
        return model.is_relative_to(folder) or model.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return False


def find_models(
    *,
    within_s: float = WITHIN_S,
    cancelled: Callable[[], bool] = lambda: False,
    look_at: Callable[[Found], None] = lambda _found: None,
) -> tuple[list[Found], list[str]]:
    """All models of all directories, each with a name of its own, and a sentence about each that cannot be read.

    A directory that does not answer in time gives what it has given so far; its search goes on, and the next call with
    the same `look_at` waits for it again instead of beginning another.

    Args:
        look_at: called with each model by the thread that found it, before it counts as found.
    """
    around = model_directories()
    searches = [_search(directory, look_at, around) for directory in around]
    until = time.monotonic() + within_s
    for search in searches:
        while search.is_alive() and time.monotonic() < until and not cancelled():
            search.join(_LOOK_S)
    found = [each for search in searches for each in sorted(search.found, key=lambda each: each.name.casefold())]
    return _with_own_names(found), [problem for search in searches if (problem := search.trouble())]


def name_at(path: Path) -> str:
    """The name of the model at a path that does not tell it: a hub cache's snapshot, or a file of Ollama's.

    Returns:
        An empty string for any other path.
    """
    if _SNAPSHOT.fullmatch(path.name) and path.parent.name == "snapshots":
        return _hub_id(path.parent.parent.name)
    if _DIGEST.fullmatch(path.name) and path.parent.name == "blobs":
        models = _ollama(path.parent.parent, _Walk())
        return next((model.name for model in models if model.path.name == path.name), path.name[:19])
    return ""


class _Search(threading.Thread):
    """Looks through one directory; `found` grows while it does."""

    def __init__(
        self, directory: ModelDirectory, look_at: Callable[[Found], None], around: list[ModelDirectory]
    ) -> None:
        super().__init__(name=f"models in {directory.folder.name}", daemon=True)
        self._directory = directory
        self._look_at = look_at
        self._walk = _Walk(frozenset(other.folder for other in around))
        self._problem = ""
        self.found: list[Found] = []

    def run(self) -> None:
        folder, is_ours = self._directory.folder, self._directory.is_ours
        try:
            self._problem = trouble_with(folder) if is_ours else ""
            if self._problem:
                return
            for model in _models_of(self._directory, self._walk):
                self._look_at(model)
                self.found.append(model)
            if is_ours:
                note_connected(folder)
        except OSError as error:
            if is_ours:
                self._problem = f"Cannot read the model folder {folder} ({reason(error)})."

    def trouble(self) -> str:
        """What is wrong with the directory, in a sentence; empty if nothing is."""
        if self.is_alive():
            return f"{self._directory.folder} has not answered yet: models in it may be missing from the list."
        if self._walk.is_cut:
            return f"{self._directory.folder} holds too many files: models in it may be missing from the list."
        return self._problem


_running: dict[tuple[ModelDirectory, Callable[[Found], None]], _Search] = {}
_running_lock = threading.Lock()


def _search(directory: ModelDirectory, look_at: Callable[[Found], None], around: list[ModelDirectory]) -> _Search:
    """A search that begins now, or the one that has not ended yet."""
    with _running_lock:
        for key in [key for key, search in _running.items() if not search.is_alive()]:
            del _running[key]
        search = _running.get((directory, look_at))
        if search is None:
            search = _running[directory, look_at] = _Search(directory, look_at, around)
            search.start()
        return search


@dataclass(slots=True)
class _Walk:
    """The limits of one search, the folders that it has seen (links may lead back to one), and those left to others."""

    others: frozenset[Path] = frozenset()
    entries: int = 0
    is_cut: bool = False
    seen: set[tuple[int, int]] = field(default_factory=set)

    def open(self, folder: Path) -> dict[str, os.DirEntry[str]]:
        """What is in a folder, by name and without what is hidden; nothing if it was seen before."""
        status = folder.stat()
        if (status.st_dev, status.st_ino) in self.seen:
            return {}
        self.seen.add((status.st_dev, status.st_ino))
        names: dict[str, os.DirEntry[str]] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                self.entries += 1
                if self.entries > _MOST_ENTRIES:
                    self.is_cut = True
                    break
                if not entry.name.startswith("."):
                    names[entry.name] = entry
        return dict(sorted(names.items()))

    def folders(self, folder: Path) -> list[Path]:
        try:
            return [folder / name for name, entry in self.open(folder).items() if _is_dir(entry)]
        except OSError:
            return []


def _models_of(directory: ModelDirectory, walk: _Walk) -> Iterator[Found]:
    if directory.origin == OWN:  # a folder per model, whatever state it is in
        with contextlib.suppress(FileNotFoundError):
            for name, entry in walk.open(directory.folder).items():
                if _is_dir(entry) and _may_be_a_model(directory.folder / name):
                    yield Found(name, directory.folder / name, OWN)
        return
    os.stat(directory.folder)  # raises if it is not there
    if directory.origin == HUB_CACHE:
        yield from _hub_cache(directory.folder, walk)
    elif directory.origin == OLLAMA:
        yield from _ollama(directory.folder, walk)
    else:
        yield from _tree(directory.folder, directory.origin, walk)


def _tree(folder: Path, origin: str, walk: _Walk, depth: int = _DEEPEST) -> Iterator[Found]:
    try:
        entries = walk.open(folder)
    except OSError:
        if depth == _DEEPEST:
            raise
        return
    if origin == FOLDER and MANIFEST_NAME in entries:  # one of ours, moved here or downloaded to here
        yield Found(plain_line(folder.name), folder, OWN)
        return
    if (
        CONFIG_NAME in entries
        and _has_weights(entries)
        and (origin == FOLDER or MODULES in entries or _writes_text(folder / CONFIG_NAME))
    ):
        yield Found(plain_line(folder.name), folder, origin)

    def is_model(name: str) -> bool:
        """Not the part of a model that sees pictures, nor as GPT4All names one that is still arriving."""
        return name.endswith(SUFFIX) and "mmproj" not in name and not name.startswith("incomplete-")

    for first in dict.fromkeys(first_part(folder / name) for name in entries if is_model(name.lower())):
        parts = all_parts(first)
        if parts and all(_is_file(entries.get(part.name)) for part in parts):
            stem = stem_of(first)
            yield Found(plain_line(folder.name if NO_NAME.match(stem) else stem), first, origin)
    if depth > 0:
        for name, entry in entries.items():
            if _is_dir(entry) and folder / name not in walk.others:
                yield from _tree(folder / name, origin, walk, depth - 1)


def _may_be_a_model(folder: Path) -> bool:
    """Whether anything in it is a model's, or it is empty or unreadable: what stays of a folder whose model was removed
    is no damaged model."""
    try:
        names = os.listdir(folder)
    except OSError:
        return True
    return not names or any(
        name in (MANIFEST_NAME, CONFIG_NAME) or name.lower().endswith(_WEIGHTS) or is_beside_weights(name)
        for name in names
    )


def _has_weights(entries: dict[str, os.DirEntry[str]]) -> bool:
    """Whether there are safetensors files, and of numbered ones all: a cache holds models that are still arriving."""
    files = [name for name in entries if name.endswith(".safetensors") and _is_file(entries[name])]
    numbered = [match for name in files if (match := _SHARD.search(name))]
    return bool(files) and (not numbered or len(numbered) >= int(numbered[0][1]))


def _writes_text(config: Path) -> bool:
    """Whether it may be a language model, by its class: caches are full of models that classify or see.

    One that cannot be read may be; describing it says what is wrong.
    """
    classes = read_record(config, MAX_CONFIG_BYTES).get("architectures")
    known = isinstance(classes, list) and all(isinstance(each, str) for each in classes)
    return not classes or not known or any(TEXT_CLASS.search(each) for each in classes)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_file(entry: os.DirEntry[str] | None) -> bool:
    try:
        return entry is not None and entry.is_file()
    except OSError:
        return False


def _hub_cache(folder: Path, walk: _Walk) -> Iterator[Found]:
    for repository in walk.folders(folder):
        if not repository.name.startswith("models--"):
            continue
        seen: set[Path] = set()
        for snapshot in _snapshots(repository, walk):
            for found in _tree(snapshot, HUB_CACHE, walk, _DEEPEST - 1):
                place = found.path.relative_to(snapshot)
                if place not in seen:
                    seen.add(place)
                    is_whole = found.path == snapshot
                    yield replace(found, name=_hub_id(repository.name)) if is_whole else found


def _snapshots(repository: Path, walk: _Walk) -> list[Path]:
    """Those of one repository, the one that `main` means first, then the newest."""
    main = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        main = read_untrusted(repository / "refs" / "main", 100).decode().strip()

    def newest(snapshot: Path) -> tuple[bool, float]:
        with contextlib.suppress(OSError):
            return snapshot.name == main, snapshot.stat().st_mtime
        return False, 0.0

    return sorted(walk.folders(repository / "snapshots"), key=newest, reverse=True)


def _hub_id(folder: str) -> str:
    return plain_line(folder.removeprefix("models--").replace("--", "/", 1))


def _ollama(folder: Path, walk: _Walk) -> Iterator[Found]:
    """The models of Ollama's manifests; their files are taken from the store alone, whatever a manifest says."""
    for host in walk.folders(folder / "manifests"):
        for namespace in walk.folders(host):
            for name in walk.folders(namespace):
                with contextlib.suppress(OSError):
                    for tag in walk.open(name):
                        blob = _ollama_blob(folder / "blobs", name / tag)
                        if blob is not None:
                            yield Found(_ollama_name(host.name, namespace.name, name.name, tag), blob, OLLAMA)


def _ollama_name(host: str, namespace: str, name: str, tag: str) -> str:
    """As Ollama writes it: `NAME:TAG`, with what is before it where it is not the usual."""
    parts = [] if host == "registry.ollama.ai" else [host]
    parts += [] if parts == [] and namespace == "library" else [namespace]
    return plain_line("/".join([*parts, f"{name}:{tag}"]))


def _ollama_blob(blobs: Path, manifest: Path) -> Path | None:
    """The file with a manifest's model; None if it is not there in full, or is more than one file."""
    try:
        layers = parse_json(read_untrusted(manifest, _MOST_BYTES))["layers"]
        if any(layer["mediaType"] == _OLLAMA_ADAPTER for layer in layers):
            return None
        (model,) = (layer for layer in layers if layer["mediaType"] == _OLLAMA_MODEL)
        digest = _DIGEST.fullmatch(model["digest"])
        if digest is None:
            return None
        blob = blobs / f"sha256-{digest[1]}"
        is_inside = blob.resolve().parent == blobs.resolve()
        return blob if is_inside and blob.is_file() and blob.stat().st_size == model["size"] else None
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return None


def _with_own_names(found: list[Found]) -> list[Found]:
    """The same models, those whose name another has already with their origin behind it.

    Names that differ only by case are the same: a user types either.
    """
    named: dict[str, Found] = {}
    places: set[Path] = set()
    for model in found:
        if model.path in places:
            continue
        places.add(model.path)
        name, number = model.name or "model", 1
        while name.casefold() in named:
            number += 1
            name = f"{model.name} ({model.origin}{f' {number - 1}' if number > 2 else ''})"
        named[name.casefold()] = replace(model, name=name)
    return list(named.values())
