"""What pyproject.toml says of Switchyard, and how the makers of packages run programs."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).resolve().parent / "files"
"""Templates and data that go into packages."""


class PackagingError(Exception):
    """A package could not be made; the message is one sentence with a remedy."""


@dataclass(frozen=True)
class Project:
    """Switchyard's own data: version, words, and what window and engine depend on."""

    version: str
    description: str
    license: str
    requires_python: str
    shared: tuple[str, ...]
    window_only: tuple[str, ...]
    engine_only: tuple[str, ...]

    @property
    def window(self) -> tuple[str, ...]:
        """All that the window needs."""
        return (*self.window_only, *self.shared)

    @property
    def engine(self) -> tuple[str, ...]:
        """All that the engine needs."""
        return (*self.engine_only, *self.shared)


def read_project(checkout: Path = CHECKOUT) -> Project:
    """Reads the checkout's pyproject.toml.

    Raises:
        PackagingError: a name that only one part needs is not among the dependencies.
    """
    document = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    said, ours = document["project"], document["tool"]["switchyard"]
    window, engine = _names(ours["window-only"]), _names(ours["engine-only"])
    dependencies: list[str] = said["dependencies"]
    unknown = (window | engine) - _names(dependencies)
    if unknown:
        raise PackagingError(
            f"pyproject.toml names {', '.join(sorted(unknown))} under tool.switchyard, but depends on none."
        )
    return Project(
        version=said["version"],
        description=said["description"],
        license=said["license"],
        requires_python=said["requires-python"],
        shared=tuple(each for each in dependencies if name_of(each) not in window | engine),
        window_only=tuple(each for each in dependencies if name_of(each) in window),
        engine_only=tuple(each for each in dependencies if name_of(each) in engine),
    )


def name_of(requirement: str) -> str:
    """`PySide6-Essentials>=6.11; ...` -> `pyside6-essentials`, as package indices compare names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def _names(requirements: Iterable[str]) -> set[str]:
    return {name_of(each) for each in requirements}


def run(
    command: Sequence[str | Path], why: str, *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Runs a program and returns what it printed.

    Args:
        why: what failed if it fails, such as "The wheels could not be built".

    Raises:
        PackagingError: it failed, or is not there.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **env} if env else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise PackagingError(f"{why}: {words[0]} could not be started ({error.strerror}).") from error
    if done.returncode != 0:
        last: Any = [line for line in done.stdout.splitlines() if line.strip()][-8:]
        raise PackagingError(f"{why}: {' '.join(words[:3])} failed.\n" + "\n".join(last))
    return done.stdout
