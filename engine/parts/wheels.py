"""Which wheels make the engine's part on this machine: the build of PyTorch for its cards, from the locked list."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.queue import Download
from engine.checkpoint.downloads.records import PARTS, PlannedFile
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, new_folder, require_space
from engine.common.installed import (
    Bundle,
    Part,
    bundle,
    lost_files,
    part,
    part_name,
    parts_dir,
    this_python,
    version,
    whole_parts,
)
from engine.hardware import torch_builds
from engine.hardware.torch_builds import BUILDS, Choice

_UNPACKED = 3.0
"""Bytes on the disk for each byte of the wheels; twice as many as they unpack to on Windows, the worst of all."""


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str
    version: str
    url: str
    sha256: str
    bytes: int

    @property
    def file(self) -> str:
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


@dataclass(frozen=True, slots=True)
class EngineSource:
    """What comes with a window, for the engine of its version: the list of wheels, and the folder of our own."""

    version: str
    lock: Path
    own: Path

    @classmethod
    def of_window(cls, window: Part) -> EngineSource:
        """What an updated window brought along."""
        return cls(window.version, window.folder / BROUGHT / "engine-lock.json", window.folder / BROUGHT / "wheels")


BROUGHT = "switchyard-update"
"""The folder in an updated window's part with what its engine is made of."""


def present_source() -> EngineSource:
    packed, running = need_bundle(), part(part_name("window", version()))
    if running is not None and version() != packed.version:
        return EngineSource.of_window(running)
    return EngineSource(packed.version, packed.engine_lock, packed.wheels)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What is fetched for this machine, and why.

    Attributes:
        name: of the part.
        build: of PyTorch, as in the list; `build_name` for people.
        cards: the cards that decided; empty for none.
        why: a sentence or two, or nothing to say.
        reused: a part of another version with the very same wheels: nothing has to be fetched.
    """

    name: str
    build: str
    build_name: str
    cards: tuple[str, ...]
    why: str
    wheels: tuple[Wheel, ...]
    source: EngineSource
    reused: Part | None = None

    @property
    def download_bytes(self) -> int:
        return sum(wheel.bytes for wheel in self.wheels)

    @property
    def unpacked_bytes(self) -> int:
        """What they take on the disk when unpacked, about."""
        return round(_UNPACKED * self.download_bytes)


def need_bundle() -> Bundle:
    found = bundle()
    if found is None:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            "This Switchyard runs from a checkout or a Python environment, where set-up installs the engine: see the "
            "README.",
        )
    return found


def choose_engine(
    chosen: Callable[[], Choice] = torch_builds.chosen, source: EngineSource | None = None
) -> EngineChoice:
    """What suits this machine, by default for the window that runs.  May take seconds: it asks the cards' drivers."""
    packed = need_bundle()
    source = source or present_source()
    wheels, lists = read_engine_lock(source.lock)
    here = {str(each["build"]): each for each in lists if _is_for_here(each, packed)}
    if not here:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"This package of Switchyard has no engine for {packed.platform} with Python {this_python()}: install the "
            "package that was made for this system.",
        )
    choice = chosen()
    build, why = choice.build.label, choice.why
    if build not in here:
        instead = next(iter(each for each in ("cpu", "cu130", *here) if each in here))
        built = f"This package does not offer PyTorch's build for {choice.build.name}; the one for {_called(instead)} "
        why = f"{why} {built}{'is fetched, and models run on the processor.' if build != 'cpu' else 'runs there too.'}"
        build = instead
    files = tuple(wheels[str(file)] for file in here[build]["files"])
    return EngineChoice(
        name=part_name("engine", source.version, build),
        build=build,
        build_name=_called(build),
        cards=_cards(),
        why=why.strip(),
        wheels=files,
        source=source,
        reused=_same_wheels(files),
    )


def read_engine_lock(path: Path) -> tuple[dict[str, Wheel], list[dict[str, Any]]]:
    """(all wheels by file name, the lists of them) of an `engine-lock.json`."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        wheels = {str(file): Wheel(**each) for file, each in said["wheels"].items()}
        lists = [dict(each) for each in said["lists"]]
        if said["format"] != 1 or any(file not in wheels for each in lists for file in each["files"]):
            raise ValueError("format")
        if any(wheel.file != file or not _is_checksum(wheel.sha256) for file, wheel in wheels.items()):
            raise ValueError("a wheel")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} is missing or damaged: install Switchyard again; models and chats stay."
        ) from None
    return wheels, lists


def begin_download(choice: EngineChoice) -> Download:
    folder = downloads_folder()
    with disk_errors_explained(folder):
        new_folder(folder)
    require_space(folder, choice.download_bytes + choice.unpacked_bytes)
    if choice.name not in {part_of(each) for each in queue.downloads()}:
        shutil.rmtree(folder / choice.name, ignore_errors=True)
    files = [PlannedFile(each.file, each.file, each.bytes, each.sha256, each.url) for each in choice.wheels]
    return queue.add_part(choice.name, f"Engine ({choice.build_name})", files, folder)


def downloads_folder() -> Path:
    """Where the wheels lie until they are unpacked."""
    return parts_dir() / "downloads"


def fetched_folder(name: str) -> Path | None:
    """The folder of a part's wheels, if they have all arrived."""
    folder = downloads_folder() / name
    return folder if folder.is_dir() else None


def part_of(download: Download) -> str:
    return download.reference.removeprefix(PARTS)


def _is_for_here(listed: dict[str, Any], packed: Bundle) -> bool:
    return (listed.get("platform"), listed.get("python")) == (packed.platform, this_python())


def _same_wheels(files: Sequence[Wheel]) -> Part | None:
    wanted = {wheel.file: wheel.sha256 for wheel in files}
    same = (one for one in whole_parts("engine") if one.whole.wheels == wanted)
    return next((one for one in same if not lost_files(one.folder)), None)


def _called(build: str) -> str:
    if build == "cpu":
        return "the processor" if platform.system() != "Darwin" else "Apple's processors"
    return BUILDS[build].name if build in BUILDS else build


def _cards() -> tuple[str, ...]:
    nvidia = [f"{card.name}, driver {card.driver}" for card in torch_builds.nvidia_cards()]
    amd = [f"AMD {name}" for name in torch_builds.amd_cards()]
    intel = [f"Intel {number}" for number in torch_builds.intel_cards()]
    return tuple(nvidia + amd + intel)


def _is_checksum(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
