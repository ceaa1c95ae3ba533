#!/usr/bin/env python3
"""Writes each library's licence into resources/THIRD_PARTY.md; fails if one is not allowed.

    .venv/bin/python installers/licences.py

Licences come from the metadata of the installed packages.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from steps_environment import LOCKED_RUNTIME, LOCKED_TESTS

THIRD_PARTY = Path(__file__).resolve().parent.parent / "resources" / "THIRD_PARTY.md"
TABLE_HEAD = "| licence | libraries |"
ALLOWED = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "LGPL-3.0-only",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Zlib",
    }
)
"""Licences (SPDX) under which Switchyard may use a library that it does not change."""

# Names used by packages without SPDX expressions.
_OTHER_NAMES = {
    # pypdfium2; PDFium's parts have licences of the same kinds (MIT, BSD, Zlib, FreeType), listed in its wheel.
    "bsd-3-clause, apache-2.0, dependency licenses": "BSD-3-Clause AND Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 2-clause license": "BSD-2-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
_NOT_INSTALLED_EVERYWHERE = {
    "colorama": "BSD-3-Clause",
    "hf-xet": "Apache-2.0",
    "pywin32": "PSF-2.0",
    "pywin32-ctypes": "BSD-3-Clause",
}
"""Licences of packages for other systems, from PyPI."""


def main() -> int:
    """Writes the table; returns 1 if a licence is unknown or not allowed, and reports it."""
    text = THIRD_PARTY.read_text(encoding="utf-8")
    THIRD_PARTY.write_text(text[: text.index(TABLE_HEAD)] + table(), encoding="utf-8")
    wrong = {name: licence_of(name) for name in locked_packages(LOCKED_RUNTIME, LOCKED_TESTS)}
    wrong = {name: licence for name, licence in wrong.items() if not is_allowed(licence)}
    for name, licence in wrong.items():
        print("{}: {} is not an allowed licence".format(name, licence or "none"), file=sys.stderr)
    return int(bool(wrong))


def table() -> str:
    """Runtime dependencies by licence, as Markdown."""
    names: dict[str, list[str]] = {}
    for name in sorted(locked_packages(LOCKED_RUNTIME)):
        names.setdefault(licence_of(name), []).append(name)
    rows = (f"| {licence} | {', '.join(names[licence])} |" for licence in sorted(names))
    return "\n".join([TABLE_HEAD, "|---|---|", *rows, ""])


def locked_packages(*files: str) -> set[str]:
    """The names in the lists, plus PyTorch, which is in none."""
    folder = Path(__file__).resolve().parent
    texts = ((folder / name).read_text(encoding="utf-8") for name in files)
    return {"torch"} | {name for text in texts for name in re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE)}


def licence_of(name: str) -> str:
    """The licence of an installed package as an SPDX expression; empty if it has none."""
    try:
        metadata = importlib.metadata.metadata(name)
    except importlib.metadata.PackageNotFoundError:
        return _NOT_INSTALLED_EVERYWHERE.get(name, "")
    named: list[str] = [
        *(metadata.get_all("License-Expression") or []),
        *(text.strip() for text in metadata.get_all("License") or []),
    ]
    classifiers = metadata.get_all("Classifier") or []
    named += [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")]
    for text in named:
        expression = _OTHER_NAMES.get(text.lower(), text)
        if expression and "\n" not in expression and expression != "DFSG approved":
            return expression
    return ""


def is_allowed(expression: str) -> bool:
    """Whether an expression has an alternative whose licences are all allowed."""
    return any(all(each in ALLOWED for each in _parts(offer, "AND")) for offer in _parts(expression, "OR"))


def _parts(expression: str, operator: str) -> Iterator[str]:
    for part in re.split(rf"\s+{operator}\s+", expression.strip(" ()")):
        yield part.strip(" ()")


if __name__ == "__main__":
    sys.exit(main())
