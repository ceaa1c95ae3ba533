"""Decodes text files by their byte order mark, otherwise as UTF-8, and marks undecodable bytes."""

from __future__ import annotations

import codecs
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import open_foreign

_KEPT_APART = "switchyard.kept-apart"


def _keep_apart(error: UnicodeError) -> tuple[str, int]:
    """Like `surrogateescape`, but also for bytes below 128, which a broken UTF-16 surrogate pair may have."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff" * (error.end - error.start), error.end


codecs.register_error(_KEPT_APART, _keep_apart)

_HALF_PAIR = re.compile("[\ud800-\udfff]")
# Longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LOOKED_AT = 4096
WRONG_ENCODING = "is not valid in the file's encoding; name the right one with --encoding, such as cp1252"


def encoding_of(path: Path, asked: str | None) -> str:
    """The encoding to read a file with.

    Raises:
        EngineError: `INVALID_REQUEST`, for an unknown encoding.
    """
    if asked is not None:
        try:
            return codecs.lookup(asked).name
        except LookupError:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"There is no encoding called {asked!r}: use for example utf-8 or cp1252."
            ) from None
    with open_foreign(path) as file:
        start = file.read(_LOOKED_AT)
    return next((name for mark, name in _MARKS if start.startswith(mark)), _unmarked(start))


def _unmarked(start: bytes) -> str:
    """UTF-16 without a mark, if most byte pairs contain a zero; otherwise UTF-8."""
    pairs = len(start) // 2
    high, low = start[0 : 2 * pairs : 2].count(0), start[1 : 2 * pairs : 2].count(0)
    if pairs and max(high, low) > 0.7 * pairs and min(high, low) < 0.1 * pairs:
        return "utf-16-be" if high > low else "utf-16-le"
    return "utf-8"


@contextmanager
def open_text(path: Path, encoding: str) -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """The file's text with its newlines, and a function that returns the share that has been read.

    Undecodable bytes become lone surrogates: see `is_text`.
    """
    with open_foreign(path, buffering=1 << 20) as raw:
        size = max(os.fstat(raw.fileno()).st_size, 1)
        text = io.TextIOWrapper(raw, encoding=encoding, errors=_KEPT_APART, newline="")
        try:
            yield text, lambda: min(1.0, raw.tell() / size)
        finally:
            text.detach()


def sound(value: Any) -> Any:
    """The JSON value with lone surrogates replaced: JSON allows them, files and tokenizers do not."""
    if isinstance(value, str):
        return value if is_text(value) else _HALF_PAIR.sub("\ufffd", value)
    if isinstance(value, dict):
        return {sound(name): sound(entry) for name, entry in value.items()}
    return [sound(entry) for entry in value] if isinstance(value, list) else value


def is_text(value: str) -> bool:
    """Whether the text was completely decodable."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
