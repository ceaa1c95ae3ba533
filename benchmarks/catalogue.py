"""For maintainers: compares every entry of the catalogue with what the hub says."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.checkpoint.catalogue import Catalogue, CatalogueEntry, CatalogueFile, catalogue_dir, read_catalogue
from engine.checkpoint.hub import Repository, parse_reference, read_repository
from engine.checkpoint.hub.contents import candidates
from engine.common.errors import EngineError


def differences(catalogue: Catalogue) -> list[str]:
    """What the hub says otherwise than the catalogue, a line each; an empty list if nothing differs."""
    found: list[str] = []
    for entry in catalogue.entries:
        repositories: dict[str, Repository | EngineError] = {}
        for file in entry.files:
            where = parse_reference(file.reference)
            key = f"{where.hub}:{where.id}"
            if key not in repositories:
                try:
                    repositories[key] = read_repository(key)
                except EngineError as error:
                    repositories[key] = error
                    found.append(f"{entry.name}: {error.message}")
            repository = repositories[key]
            if not isinstance(repository, EngineError):
                found += _differences(entry, file, repository)
    return list(dict.fromkeys(found))


def _differences(entry: CatalogueEntry, file: CatalogueFile, repository: Repository) -> Iterator[str]:
    where = parse_reference(file.reference)
    if repository.id != where.id:
        yield f"{entry.name}: {where.id} is called {repository.id} now"
    if repository.licence and _plain(repository.licence) != _plain(entry.licence):
        yield f"{entry.name}: {repository.id} is under {repository.licence}, not {entry.licence}"
    if repository.gated:
        yield f"{entry.name}: {repository.id} is gated"
    able = {one.label: one for one in candidates(repository)}
    one = able.get(where.what)
    if one is None:
        yield f"{entry.name}: {repository.id} has no {where.what}, but {', '.join(sorted(able))}"
    elif one.problem:
        yield f"{entry.name}: {file.reference} cannot run: {one.problem}"
    elif one.bytes != file.bytes:
        yield f"{entry.name}: {file.reference} has {one.bytes} bytes, not {file.bytes}"


def _plain(licence: str) -> str:
    """`LFM 1.0` and `lfm1.0` are one."""
    return re.sub(r"[^a-z0-9]", "", licence.casefold())


def main(arguments: Sequence[str] | None = None) -> int:
    """The maintainer's command; returns the exit code: 1 if something differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.catalogue", description=__doc__)
    parser.add_argument("action", choices=["check"], help="compare every entry with what the hub says")
    parser.add_argument("--file", type=Path, help="a catalogue (default: the shipped one)")
    asked = parser.parse_args(arguments)
    try:
        catalogue = read_catalogue(asked.file or catalogue_dir() / "catalogue.json")
    except EngineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    found = differences(catalogue)
    sys.stdout.write("".join(f"{line}\n" for line in found) or f"All {len(catalogue.entries)} entries agree.\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
