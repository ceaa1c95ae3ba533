"""The engine's part as one file, for machines without a connection: the wheels of the locked list, in a zip.

The window takes it under "Use a file" on its first page, and checks every wheel again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packages.bundle import ENGINE_LOCK
from packages.project import PackagingError, read_project

_CHUNK_BYTES = 1 << 20


def write_offline_file(
    target: Path, platform: str, python: str, build: str, near: Sequence[Path] = (), lock: Path = ENGINE_LOCK
) -> Path:
    """`switchyard-VERSION-engine-PLATFORM-BUILD-PYTHON.zip`, in `target`; a file that stops in the middle is removed.

    Args:
        python: version of the bundle's Python, such as "3.13".
        build: of PyTorch, as in the list, such as "cpu".
        near: folders with wheels that need not be fetched.

    Raises:
        PackagingError: no such list, a wheel that cannot be fetched, or one with another hash.
    """
    wanted = wheels_of(platform, python, build, lock)
    version = read_project().version
    file = target / f"switchyard-{version}-engine-{platform}-{build}-py{python}.zip"
    with tempfile.TemporaryDirectory(prefix="switchyard-offline-", dir=target) as name:
        unfinished = Path(name) / file.name
        # Wheels are compressed already.
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as zipped:
            for wheel, said in wanted.items():
                fetched = fetch_wheel(wheel, said, Path(name), near)
                zipped.write(fetched, wheel)
                fetched.unlink()
        return unfinished.replace(file)


def builds_of(platform: str, python: str, lock: Path = ENGINE_LOCK) -> list[str]:
    """Builds of PyTorch that the list has for a system and a version of Python."""
    lists = json.loads(lock.read_text(encoding="utf-8"))["lists"]
    return [each["build"] for each in lists if (each["platform"], each["python"]) == (platform, python)]


def wheels_of(platform: str, python: str, build: str, lock: Path = ENGINE_LOCK) -> dict[str, dict[str, Any]]:
    """What the list says of each wheel of an engine's part, by file name.

    Raises:
        PackagingError: it has no such part.
    """
    document = json.loads(lock.read_text(encoding="utf-8"))
    place = {"platform": platform, "python": python, "build": build}
    wanted = next((each for each in document["lists"] if place.items() <= each.items()), None)
    if wanted is None:
        builds = ", ".join(builds_of(platform, python, lock)) or "none"
        raise PackagingError(f"{lock.name} has no {build} build for {platform} and Python {python}; it has {builds}.")
    return {file: document["wheels"][file] for file in wanted["files"]}


def fetch_wheel(name: str, said: dict[str, Any], folder: Path, near: Sequence[Path] = ()) -> Path:
    """A wheel of the list, in a folder.

    Args:
        near: folders that may have it.

    Raises:
        PackagingError: it cannot be fetched, or has another hash.
    """
    copy = folder / name
    source = next((each / name for each in near if (each / name).exists()), None)
    try:
        if source is not None:
            shutil.copyfile(source, copy)
        else:
            with urllib.request.urlopen(said["url"], timeout=60) as answer, copy.open("wb") as target:
                shutil.copyfileobj(answer, target, _CHUNK_BYTES)
    except (OSError, urllib.error.URLError) as error:
        raise PackagingError(f"{name} could not be fetched from {said['url']} ({error}).") from error
    with copy.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != said["sha256"]:
            raise PackagingError(f"{name} has another hash than in the list: nothing was written.")
    return copy
