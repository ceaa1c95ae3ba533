"""Writes `engine-lock.json`: every wheel of the engine's part, for each system, Python and build of PyTorch.

The window of an installed package fetches the engine by this list, and trusts nothing but its checksums: a wheel
without one is never written.  PyTorch's builds for cards lie on an index of its own; what the list has from there stays
as it was where that cannot be reached, if the version is the same.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steps_environment import INDEX, TORCH

LOCKED_ENGINE = "engine-lock.json"
FORMAT = 1
PYTHONS = ("3.11", "3.13")
"""Of the bundles: Debian's, and the one that comes with all others."""
PYPI = "https://pypi.org/simple/"
_WITHIN_S = 60.0
_WINDOW_ONLY = ("pyside6-essentials", "markdown-it-py", "pygments", "send2trash", "cryptography")


@dataclass(frozen=True)
class System:
    """A system that packages are made for.

    Attributes:
        target: uv's name of it.
        builds: builds of PyTorch for it.
        on_pypi: the one of them that PyPI has; a mirror of PyPI is enough for it.
        platforms: tags of its wheels, best first.
    """

    name: str
    target: str
    builds: tuple[str, ...]
    on_pypi: str
    platforms: tuple[str, ...]


def _manylinux(machine: str, newest: int) -> tuple[str, ...]:
    older = {17: f"manylinux2014_{machine}", 12: f"manylinux2010_{machine}", 5: f"manylinux1_{machine}"}
    tags = []
    for minor in range(newest, 4, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if minor in older:
            tags.append(older[minor])
    return (*tags, f"linux_{machine}")


SYSTEMS = (
    System(
        *("linux-x86_64", "x86_64-manylinux_2_34", ("cpu", "cu126", "cu130", "rocm7.2", "xpu"), "cu130"),
        _manylinux("x86_64", 34),
    ),
    System("linux-aarch64", "aarch64-manylinux_2_39", ("cpu", "cu130"), "cu130", _manylinux("aarch64", 39)),
    System(
        *("macos-arm64", "aarch64-apple-darwin", ("cpu",), "cpu"),
        (
            *(f"macosx_{major}_0_{kind}" for major in range(14, 10, -1) for kind in ("arm64", "universal2")),
            *(f"macosx_10_{minor}_universal2" for minor in range(16, 3, -1)),
        ),
    ),
    System("windows-x86_64", "x86_64-pc-windows-msvc", ("cpu", "cu126", "cu130", "xpu"), "cpu", ("win_amd64",)),
)


@dataclass(frozen=True)
class Wheel:
    """A wheel of the list."""

    name: str
    version: str
    url: str
    sha256: str
    bytes: int

    @property
    def file(self) -> str:
        """Its name."""
        return urllib.parse.unquote(urllib.parse.urlsplit(self.url).path.rpartition("/")[2])


Resolve = Callable[[str, str, str, str], str]
"""(requirements, uv's name of the system, version of Python, extra index or nothing) -> `NAME==VERSION` lines."""


def write_engine_lock(installers: Path, resolve: Resolve) -> None:
    """Writes the list beside this file."""
    file = installers / LOCKED_ENGINE
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if old.get("torch") != TORCH:
        old = {}
    index = Index()
    wheels: dict[str, Wheel] = {}
    lists: list[dict[str, Any]] = []
    for system in SYSTEMS:
        for python in PYTHONS:
            for build in system.builds:
                place = {"platform": system.name, "python": python, "build": build}
                try:
                    found = _wheels_of(system, python, build, index, resolve)
                except Unreachable as error:
                    found = _kept(old, place)
                    left = "what it had stays" if found else "left out"
                    print(f"{LOCKED_ENGINE}: {system.name} {python} {build}: {error}; {left}", file=sys.stderr)
                if found:
                    wheels |= {wheel.file: wheel for wheel in found}
                    lists.append({**place, "files": sorted(wheel.file for wheel in found)})
    listed = {name: asdict(wheels[name]) for name in sorted(wheels)}
    whole = {"format": FORMAT, "torch": TORCH, "wheels": listed, "lists": lists}
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(f"{LOCKED_ENGINE}: {len(lists)} lists of {len(wheels)} wheels")


def missing_builds(installers: Path) -> list[str]:
    """What the list beside this file should have and does not, such as `linux-x86_64 3.13 cpu`: no release without.

    People whose build is missing would be given another, with gigabytes for cards that they do not have.
    """
    lists = json.loads((installers / LOCKED_ENGINE).read_text(encoding="utf-8"))["lists"]
    there = {(each["platform"], each["python"], each["build"]) for each in lists}
    wanted = [(system.name, python, build) for system in SYSTEMS for python in PYTHONS for build in system.builds]
    return [" ".join(each) for each in wanted if each not in there]


def engine_requirements(project: str) -> list[str]:
    """What the engine's process needs of the checkout's requirements, without PyTorch."""
    all_of_it = [str(each) for each in tomllib.loads(project)["project"]["dependencies"]]
    named = {re.split(r"[^A-Za-z0-9_.-]", each, maxsplit=1)[0].lower(): each for each in all_of_it}
    return [each for name, each in named.items() if name not in (*_WINDOW_ONLY, "torch") and "PySide6" not in each]


def _wheels_of(system: System, python: str, build: str, index: Index, resolve: Resolve) -> list[Wheel]:
    from_pypi = build == system.on_pypi
    own = "" if from_pypi else INDEX + build
    if own:
        index.files(own, "torch")  # whether it can be reached
    torch = f"torch==={TORCH}" if from_pypi else f"torch=={TORCH}+{build}"
    lines = resolve(torch, system.target, python, own)
    found = []
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)===?([^\s;\\]+)", lines, re.MULTILINE):
        found.append(index.best(name, version, system, python, [own, PYPI] if own else [PYPI]))
    return found


def _kept(old: dict[str, Any], place: dict[str, str]) -> list[Wheel]:
    for each in old.get("lists", ()):
        if {key: each[key] for key in place} == place:
            return [Wheel(**old["wheels"][file]) for file in each["files"]]
    return []


class Unreachable(Exception):  # noqa: N818 - the list does without it
    """An index does not answer."""


class Index:
    """Package indices, each page asked for once."""

    def __init__(self) -> None:
        self._pages: dict[str, list[dict[str, Any]]] = {}

    def files(self, base: str, name: str) -> list[dict[str, Any]]:
        """All files of a package: `filename`, `url`, `hashes` and perhaps `size`.

        Raises:
            Unreachable: the index does not answer.
        """
        url = f"{base.rstrip('/')}/{re.sub('[-_.]+', '-', name).lower()}/"
        if url not in self._pages:
            self._pages[url] = _read_page(url)
        return self._pages[url]

    def best(self, name: str, version: str, system: System, python: str, bases: Iterable[str]) -> Wheel:
        """The wheel that this system would install.

        Raises:
            Unreachable: see `files`.
            SystemExit: there is none, or none with a checksum.
        """
        for base in bases:
            ranked = []
            for file in self.files(base, name):
                rank = wheel_rank(urllib.parse.unquote(str(file["filename"])), version, system.platforms, python)
                if rank is not None:
                    ranked.append((rank, file))
            if ranked:
                return _wheel(name, version, min(ranked, key=lambda each: each[0])[1])
        sys.exit(f"lock.py stopped: {name} {version} has no wheel for {system.name} and Python {python}.")


def _wheel(name: str, version: str, file: dict[str, Any]) -> Wheel:
    sha256 = str(file.get("hashes", {}).get("sha256", ""))
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        sys.exit(f"lock.py stopped: the index gives no checksum of {file['filename']}, and without one it is not used.")
    size = file.get("size") or _size(str(file["url"]))
    return Wheel(re.sub("[-_.]+", "-", name).lower(), version, str(file["url"]), sha256, int(size))


def wheel_rank(file: str, version: str, platforms: tuple[str, ...], python: str) -> tuple[int, int] | None:
    """How well a wheel suits a system, the smallest best; None if not at all, or of another version."""
    parts = file.removesuffix(".whl").split("-")
    if not file.endswith(".whl") or len(parts) not in (5, 6) or parts[1] != version:
        return None
    minor = int(python.partition(".")[2])
    pythons, abis, tags = (set(part.split(".")) for part in parts[-3:])
    kinds = (
        f"cp3{minor}" in pythons and f"cp3{minor}" in abis,
        *(f"cp3{older}" in pythons and "abi3" in abis for older in range(minor, 1, -1)),
        "none" in abis and bool(pythons & {f"cp3{minor}", f"py3{minor}", "py3", "py2.py3"}),
    )
    places = [platforms.index(tag) for tag in tags if tag in platforms] + [len(platforms)] * ("any" in tags)
    if not any(kinds) or not places:
        return None
    return kinds.index(True), min(places)


def _read_page(url: str) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        url, headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5", "User-Agent": "switchyard-lock"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:
            body, kind = answer.read().decode("utf-8"), answer.headers.get_content_type()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise Unreachable(f"{url} answers with {error.code}") from None
    except (OSError, ValueError) as error:
        raise Unreachable(f"{url} cannot be reached ({error})") from None
    if kind.endswith("json"):
        files = json.loads(body)["files"]
        return [{**each, "url": urllib.parse.urljoin(url, str(each["url"]))} for each in files]
    found = []
    for href, name in re.findall(r'<a\s[^>]*href="([^"]+)"[^>]*>([^<]+)</a>', body):
        place, _, fragment = urllib.parse.urljoin(url, href.replace("&amp;", "&")).partition("#")
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        found.append({"filename": name.strip(), "url": place, "hashes": {"sha256": sha256}})
    return found


def _size(url: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_WITHIN_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError) as error:
        raise Unreachable(f"{url} cannot be reached ({error})") from None
