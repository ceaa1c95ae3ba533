"""What of Switchyard is installed, and where: one folder for all (a checkout, a Python environment), or a bundle.

A bundle is what the packages for Windows, Linux and macOS install: the window with its own Python, and `bundle.json`
(`SWITCHYARD_BUNDLE` names its folder).  The engine's part, with PyTorch, is fetched later, and lies with updates of the
window in the user's own folder:

parts/engine-VERSION-BUILD/   packages of the engine process; `whole.json`, written last, says that it was proven
parts/window-VERSION/         packages of a newer window, likewise
parts/NAME.partial/           on its way; never used
parts/current.json            which of them are in use, and which were before

A part is used only as a whole, and an engine only with the window of its own version.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import write_private
from engine.common.json_fields import from_fields
from engine.common.paths import python_module, resources_dir, standard_data_dir

BUNDLE_VARIABLE = "SWITCHYARD_BUNDLE"
"""Of the environment: the folder of the bundle that runs; set by its launcher."""
PARTIAL = ".partial"
WHOLE, CURRENT = "whole.json", "current.json"
_FORMAT = 1
_PART = re.compile(r"(engine|window)-([0-9][0-9A-Za-z.+]*)(?:-([a-z0-9.]+))?")
Kind = Literal["engine", "window"]


@dataclass(frozen=True, slots=True)
class Bundle:
    """An installed package.  All paths are absolute.

    Attributes:
        platform: such as `linux-x86_64`, as in the list of the engine's wheels.
        wheels: the folder of our own wheels, for the engine's part.
        packaged_as: `deb`, `run`, `nsis`, `appimage` or `dmg`.
    """

    root: Path
    version: str
    platform: str
    python: Path
    uv: Path
    window: Path
    wheels: Path
    engine_lock: Path
    packaged_as: str


@dataclass(frozen=True, slots=True)
class Whole:
    """`whole.json`: what a part is made of, written when it has been proven.

    Attributes:
        name: of its folder; any other name is that of one on its way.
        python: the version of Python that its compiled packages are for, such as `3.12`.
        build: of PyTorch; empty for a window.
        wheels: name and SHA-256 of each wheel in it.
        proven: what its self-test said.
    """

    name: str
    version: str
    platform: str
    python: str
    build: str = ""
    wheels: dict[str, str] = field(default_factory=dict)
    proven: dict[str, Any] = field(default_factory=dict)
    format: int = _FORMAT


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    folder: Path
    whole: Whole

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def version(self) -> str:
        return self.whole.version


@dataclass(frozen=True, slots=True)
class Current:
    """`current.json`: names of the parts in use, and of those before them; empty for the bundle's own, or none."""

    engine: str = ""
    window: str = ""
    previous: dict[str, str] = field(default_factory=dict)


# --- the bundle ---------------------------------------------------------------------------------------


def bundle() -> Bundle | None:
    """The bundle that runs; None in a checkout or a Python environment."""
    root = os.environ.get(BUNDLE_VARIABLE, "")
    return _read_bundle(root) if root else None


@functools.cache
def _read_bundle(named: str) -> Bundle:
    root = Path(named).absolute()
    try:
        said = json.loads((root / "bundle.json").read_text(encoding="utf-8"))
        if said["format"] != _FORMAT:
            raise ValueError("format")
        return Bundle(
            root=root,
            version=str(said["version"]),
            platform=str(said["platform"]),
            python=root / str(said["python"]),
            uv=root / str(said["uv"]),
            window=root / str(said["window"]),
            wheels=root / str(said["wheels"]),
            engine_lock=root / str(said["engine_lock"]),
            packaged_as=str(said["packaged_as"]),
        )
    except (OSError, ValueError, LookupError, TypeError):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{root / 'bundle.json'} is missing or damaged: install Switchyard again; models and chats stay.",
        ) from None


def version() -> str:
    """The version that this process runs, whatever the next start will use."""
    packed = bundle()
    if packed is not None:
        here = Path(__file__).resolve().parents[2]
        whole = read_whole(here) if here.parent == parts_dir().resolve() else None
        return whole.version if whole is not None else packed.version
    import importlib.metadata  # both take a while, and the window is to open soon
    import tomllib

    try:
        return importlib.metadata.version("switchyard")
    except importlib.metadata.PackageNotFoundError:
        project = resources_dir().parent / "pyproject.toml"
        try:
            return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
        except (OSError, ValueError, LookupError):
            return "(not installed)"


def next_version() -> str:
    packed = _need_bundle()
    newer = newer_window()
    return newer.version if newer is not None else packed.version


# --- the parts ----------------------------------------------------------------------------------------


def parts_dir() -> Path:
    """The folder of all parts: the standard one, even where the user keeps chats and models in another."""
    return standard_data_dir() / "parts"


def part_name(kind: Kind, of_version: str, build: str = "") -> str:
    """The name of a part's folder.

    Raises:
        ValueError: it cannot be one.
    """
    name = "-".join(filter(None, (kind, of_version, build)))
    if not _PART.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a part")
    return name


def part(name: str) -> Part | None:
    """The part of this name, if it is whole and for this Python and system; None otherwise."""
    matched = _PART.fullmatch(name)
    packed = bundle()
    if matched is None or packed is None:
        return None
    kind: Kind = "engine" if matched[1] == "engine" else "window"
    whole = read_whole(parts_dir() / name)
    fits = whole is not None and (whole.name, whole.platform, whole.python) == (name, packed.platform, this_python())
    return Part(kind, parts_dir() / name, whole) if whole is not None and fits else None


def read_whole(folder: Path) -> Whole | None:
    """What a folder's `whole.json` says; None without one, or if it is damaged."""
    try:
        found: Whole = from_fields(Whole, json.loads((folder / WHOLE).read_text(encoding="utf-8")))
    except (EngineError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return found if found.format == _FORMAT else None


def write_whole_record(folder: Path, whole: Whole) -> None:
    """Declares a part whole.

    Raises:
        OSError: it is not.
    """
    write_private(folder / WHOLE, json.dumps(asdict(whole), indent=1))


def whole_parts(kind: Kind) -> list[Part]:
    """All whole parts of a kind, newest version first."""
    try:
        names = [entry.name for entry in parts_dir().iterdir() if entry.name.startswith(f"{kind}-")]
    except OSError:
        return []
    found = [one for name in sorted(names) if (one := part(name)) is not None]
    return sorted(found, key=lambda one: version_order(one.version), reverse=True)


def this_python() -> str:
    """The version that compiled packages must be for."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def version_order(text: str) -> tuple[tuple[int, str], ...]:
    """A key by which versions sort: 0.2.0rc1 before 0.2.0 before 0.10.0."""
    pieces: list[tuple[int, str]] = []
    for piece in re.split(r"[.+]", text):
        number = re.match(r"\d*", piece)
        digits = number[0] if number else ""
        rest = piece[len(digits) :]
        pieces.append((int(digits or 0), rest or "~"))  # "~" sorts behind all letters
    return tuple(pieces)


# --- which are in use ---------------------------------------------------------------------------------


def read_current() -> Current:
    """`current.json`; empty if there is none, or it is damaged."""
    try:
        found: Current = from_fields(Current, json.loads((parts_dir() / CURRENT).read_text(encoding="utf-8")))
    except (EngineError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return Current()
    return found


def use_parts(**names: str) -> Current:
    """Puts parts into use (`engine=NAME`, `window=NAME`), and keeps what was before them; the next start has them.

    Raises:
        OSError: nothing has changed.
    """
    for kind, name in names.items():
        found = part(name) if name else None
        if name and (found is None or found.kind != kind):
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{name} is not complete on this computer: fetch it again, then switch."
            )
    now = read_current()
    before = {kind: getattr(now, kind) for kind in ("engine", "window")}
    if all(before[kind] == name for kind, name in names.items()):
        return now
    changed = Current(engine=names.get("engine", now.engine), window=names.get("window", now.window), previous=before)
    write_private(parts_dir() / CURRENT, json.dumps(asdict(changed), indent=1))
    return changed


def previous_parts() -> dict[str, str] | None:
    """The parts to go back to, as `use_parts` takes them; None if there are none that still work."""
    packed = bundle()
    before = read_current().previous
    if packed is None or not before.get("engine"):
        return None
    engine, window = part(before["engine"]), before.get("window", "")
    shown = part(window) if window else None
    if engine is None or (window and shown is None):
        return None
    shown_version = shown.version if shown is not None else packed.version
    return {"engine": engine.name, "window": window} if engine.version == shown_version else None


def window_folder() -> Path:
    """The packages that the window runs from: the bundle's own, or a newer one in use.  For the launcher."""
    packed = _need_bundle()
    newer = newer_window()
    return newer.folder if newer is not None else packed.window


def current_engine(of_version: str = "") -> Part | None:
    """The engine's part for a version, by default for this one: the one of `current.json`, else any whole one of that
    version; None if there is none, and the window fetches it."""
    if bundle() is None:
        return None
    wanted = of_version or version()
    now = read_current()
    for name in (now.engine, now.previous.get("engine", "")):  # an older window may still be open
        named = part(name)
        if named is not None and named.kind == "engine" and named.version == wanted:
            return named
    return next((one for one in whole_parts("engine") if one.version == wanted), None)


def needs_engine() -> bool:
    """Whether the engine's part has to be fetched before anything can be answered."""
    return bundle() is not None and current_engine() is None


def newer_window() -> Part | None:
    """The window's part that is in use instead of the bundle's own.

    A package that was installed over an update is the newer one.
    """
    packed, found = bundle(), part(read_current().window)
    if packed is None or found is None or found.kind != "window":
        return None
    return found if version_order(found.version) > version_order(packed.version) else None


def _need_bundle() -> Bundle:
    packed = bundle()
    if packed is None:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{BUNDLE_VARIABLE} is not set: start Switchyard by its launcher.")
    return packed


# --- commands -----------------------------------------------------------------------------------------


def engine_module(module: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module where PyTorch is, and the environment variables that it needs."""
    packed = bundle()
    if packed is None:
        return python_module(module)
    engine = current_engine()
    if engine is None:
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE,
            "The engine is not on this computer yet: get it on the first page of the window or by `switchyard engine`.",
        )
    return packed_module(packed, engine.folder, module)


def packed_module(packed: Bundle, folder: Path, module: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module of a part, by the bundle's Python; nothing of the user's own Python is seen."""
    variables = {BUNDLE_VARIABLE: str(packed.root), "PYTHONPATH": str(folder)}
    return [str(packed.python), "-P", "-s", "-X", "utf8", "-m", module], variables


def module_command(module: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module with the engine where it is there, else without what needs it."""
    packed = bundle()
    if packed is None:
        return python_module(module)
    engine = current_engine()
    return packed_module(packed, engine.folder if engine is not None else window_folder(), module)


def command_line() -> tuple[list[str], dict[str, str]]:
    """The command of `switchyard VERB`: see `module_command`."""
    return module_command("engine.cli")


def missing_engine(error: BaseException) -> EngineError | None:
    """What to say where a module lies in the engine's part, which this process does without; None if that is not it."""
    if bundle() is None or not isinstance(error, ModuleNotFoundError):
        return None
    try:
        engine_module("engine.cli")
    except EngineError as failure:
        return failure
    return EngineError(
        ErrorCode.DEVICE_UNAVAILABLE,
        "The engine has been installed since: load the model again once other servers have given their answers.",
    )


def before_start(arguments: Sequence[str]) -> None:
    """Goes on in the right folder of packages, if this is not it: the launcher calls this first.

    The window runs from the newest one in use, a verb from the engine's part, where PyTorch is.
    """
    packed = bundle()
    if packed is None:
        return
    has_verb = any(not argument.startswith("-") for argument in arguments) and not files_to_open(arguments)
    engine = current_engine(next_version()) if has_verb else None
    folder = engine.folder if engine is not None else _sound_window()
    if folder.resolve() != Path(__file__).resolve().parents[2]:
        command, variables = packed_module(packed, folder, "engine.cli")
        sys.exit(go_on_as([sys.executable, *command[1:], *arguments], variables))


def _sound_window() -> Path:
    """The window's folder; an updated one that has lost files since would not open, and is not used any more."""
    newer = newer_window()
    if newer is not None:
        give_up_damaged(newer.folder)
    return window_folder()


def files_to_open(arguments: Sequence[str]) -> list[str]:
    """The arguments, made absolute, if they are files or folders and no command: a desktop opens files like that."""
    are_files = all(not argument.startswith("-") and os.path.exists(argument) for argument in arguments)
    is_verb = bool(arguments) and arguments[0].isalpha() and not os.path.isfile(arguments[0])
    return [os.path.abspath(argument) for argument in arguments] if are_files and not is_verb else []


def go_on_as(command: Sequence[str], variables: dict[str, str]) -> int:
    """Becomes another process of ours; where that is not possible, waits for it and returns its exit code."""
    os.environ.update(variables)
    if sys.platform == "win32":
        # On Windows, exec would return to the shell before the other one ends.
        return subprocess.call(command)
    return os.execv(command[0], list(command))


FILES = "files.json"
_MADE_ANEW = "__pycache__"


def note_files(folder: Path) -> None:
    """Notes what a part consists of, before it is declared whole.

    Raises:
        OSError: nothing was noted.
    """
    root = str(folder)
    found = {os.path.relpath(entry.path, root).replace(os.sep, "/"): entry.stat().st_size for entry in _files(root)}
    for own in (FILES, WHOLE):
        found.pop(own, None)
    write_private(folder / FILES, json.dumps(found))


def lost_files(folder: Path) -> list[str]:
    """Files of a part that are not there any more, or have another size; none if it has no list of them."""
    try:
        noted = json.loads((folder / FILES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        return [FILES]
    if not isinstance(noted, dict):
        return [FILES]
    return [name for name, size in noted.items() if _size(os.path.join(folder, name)) != size]


def give_up_damaged(folder: Path) -> EngineError | None:
    """Has nobody use a part that has lost files, so that the next start gets it anew; None if it has lost none.

    Returns:
        What to tell people.
    """
    lost = lost_files(folder)
    if not lost:
        return None
    with suppress(OSError):  # then it is found out again the next time
        (folder / WHOLE).unlink(missing_ok=True)
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return EngineError(
        ErrorCode.DEVICE_UNAVAILABLE,
        f"The engine has lost files since it was installed ({lost[0]}{more}), perhaps to a virus scanner: start "
        "Switchyard again, and it gets them anew.",
    )


def give_up_own_part() -> EngineError | None:
    """The same for the part that this process runs from; None if it runs from none."""
    here = Path(__file__).resolve().parents[2]
    try:
        is_part = bundle() is not None and here.parent == parts_dir().resolve()
    except EngineError:
        return None
    return give_up_damaged(here) if is_part else None


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != _MADE_ANEW:
                    yield from _files(entry.path)
            elif entry.is_file():
                yield entry


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
