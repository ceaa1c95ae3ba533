"""Documents as text in parts: pages of a pdf, sections of docx, HTML and Markdown, sheets, tables, and any plain text.

They are read in a child process with limits of time and memory (`document_child`): none can end or stop this one.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.common.confined import ConfinedChild, Exchange
from engine.common.errors import CancelCheck, never_cancelled
from engine.common.sizes import about
from engine.common.untrusted import check_untrusted, reason

MEMORY_BYTES = 2 * 2**30
"""Of the process that reads."""
READING_S = 180.0
"""A book of 1,000 pages takes seconds."""
MOST_PAGES = 5_000
MOST_CHARACTERS = 16 * 2**20
"""Longer than any model's context."""
UNREADABLE = "is neither text nor a document that can be read here (pdf, docx, xlsx, html); save it as one of those"

_KINDS = {
    "pdf": ("pdf",),
    "docx": ("docx",),
    "html": ("html", "htm", "xhtml"),
    "md": ("md", "markdown"),
    "json": ("json",),
    "table": ("csv", "tsv", "parquet"),
    "xlsx": ("xlsx",),
}
_BY_SUFFIX = {f".{suffix}": kind for kind, suffixes in _KINDS.items() for suffix in suffixes}
_TEXT_SUFFIXES = (
    "txt text log rst adoc org tex bib jsonl ndjson xml svg yaml yml toml ini cfg conf properties env sql graphql "
    "proto py pyi ipynb js mjs cjs jsx ts tsx vue svelte css scss less java kt kts scala groovy gradle c h cc cpp cxx "
    "hh hpp hxx cs fs vb go rs swift m mm rb php pl pm lua r jl dart ex exs erl hs clj lisp el ml mli nim zig d pas "
    "f90 f asm s cu cuh sh bash zsh fish ps1 bat cmd cmake mk diff patch srt vtt eml po"
)
_NAMED = frozenset(("readme", "license", "licence", "makefile", "dockerfile", "changelog", "notice", "authors", "todo"))
FOLDER_SUFFIXES = frozenset((*_BY_SUFFIX, *(f".{suffix}" for suffix in _TEXT_SUFFIXES.split())))
"""Files of a folder that are read: others are mostly pictures, programs and the like."""


def kind_of(path: Path) -> str:
    """How it is read; `text` if its name says nothing else."""
    return _BY_SUFFIX.get(path.suffix.lower(), "text")


def is_readable(name: str) -> bool:
    """Whether a file of a folder is likely to be text, by its name."""
    stem, dot, suffix = name.lower().rpartition(".")
    return f".{suffix}" in FOLDER_SUFFIXES if dot and stem else suffix in _NAMED


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a document: a page (from 1; 0 where there are none), or what follows a heading."""

    text: str
    page: int = 0
    heading: str = ""


@dataclass(slots=True)
class WhatWasRead:
    pages: int = 0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or why it cannot be read.

    Attributes:
        problem: completes a sentence about the file; empty if there is none.
        remark: what was left out, in sentences.
    """

    parts: tuple[Part, ...] = ()
    pages: int = 0
    problem: str = ""
    remark: str = ""

    @property
    def text(self) -> str:
        return "\n\n".join(part.text for part in self.parts)


class _OverLimitError(Exception):
    """The argument completes a sentence about the file."""


class DocumentReader(ConfinedChild):
    """Reads one document at a time."""

    module = "engine.batch_files.document_child"

    def __init__(self, *, seconds: float = READING_S, memory_bytes: int = MEMORY_BYTES) -> None:
        super().__init__()
        self._seconds, self._memory_bytes = seconds, memory_bytes

    def over(self, seconds: float, nbytes: int = 0) -> Exception:
        return _OverLimitError(f"takes {'too much memory' if nbytes else f'more than {seconds:.0f} seconds'} to read")

    def read(
        self,
        path: Path,
        cancelled: CancelCheck = never_cancelled,
        on_share: Callable[[float], object] = lambda _share: None,
        *,
        most_bytes: int | None = None,
    ) -> Document:
        """The document; one that cannot be read says why.

        Args:
            on_share: told now and then, on another thread, how much has been read, 0 to 1.
            most_bytes: a larger file is not read.
        """
        try:
            check_untrusted(path, most_bytes or 2**62)
        except OSError as error:
            if most_bytes is not None and path.is_file() and path.stat().st_size > most_bytes:
                size = about(path.stat().st_size)
                return Document(problem=f"has {size}, more than the {about(most_bytes)} that are read")
            return Document(problem=f"cannot be read ({reason(error)})")
        with self._locked(cancelled):
            try:
                return self._read(path, cancelled, on_share)
            except _OverLimitError as problem:
                return Document(problem=str(problem))

    def _read(self, path: Path, cancelled: CancelCheck, on_share: Callable[[float], object]) -> Document:
        parts: list[Part] = []

        def on_line(line: list[Any]) -> None:
            if line[0] == "share":
                on_share(float(line[1]))
            else:
                parts.append(Part(line[3], line[1], line[2]))

        request = json.dumps({"path": str(path.absolute()), "seconds": self._seconds}).encode("ascii") + b"\n"
        exchange = self._exchange = Exchange(self._child(), request, self._seconds, on_line=on_line)
        self._wait(exchange, cancelled, self._memory_bytes)
        answer = exchange.answer
        if answer is None:
            taken = time.monotonic() - exchange.begun_s
            self._end()
            if taken >= self._seconds:
                raise self.over(self._seconds)
            return Document(problem="is damaged: its reader crashed on it")
        if problem := answer.get("problem", ""):
            if "memory" in problem:
                self._end()  # it may still hold most of it
            return Document(pages=answer["pages"], problem=problem)
        if not any(part.text.strip() for part in parts):
            is_scan = answer["pages"] > 0
            problem = "is a scan: pictures without text; run text recognition over it" if is_scan else "has no text"
            return Document(pages=answer["pages"], problem=problem)
        return Document(tuple(parts), answer["pages"], "", answer["remark"])


DOCUMENTS = DocumentReader()
"""Shared by all that read documents in this process."""

atexit.register(DOCUMENTS.close)
