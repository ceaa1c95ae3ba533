"""Opens untrusted files and parses untrusted JSON.

A model's folder, a file of rows or an exported chat may contain a pipe, a device such as `/dev/zero`, a link to one, or
a file of many gigabytes where a few kilobytes belong. Everything that reads such a file opens it here: regular files
only, up to a size limit, without ever blocking. Every defect of JSON is a ValueError, and nesting is limited.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

Opener = Callable[[Path], BinaryIO]
"""Opens a file that may be elsewhere, as `open_untrusted` does here: a stream that can seek, or an OSError."""

# `open` would block forever on a pipe without a writer; a terminal must not become our controlling terminal.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


def open_untrusted(path: Path, *, buffering: int = -1) -> BinaryIO:
    """A regular file, or a link to one, opened for reading its bytes.

    Args:
        buffering: as for `open`; 0 gives the file without a buffer.

    Raises:
        OSError: it cannot be opened, or is a pipe, a socket, a device or a folder; `strerror` completes a sentence.
    """
    try:
        descriptor = os.open(path, _FLAGS | getattr(os, "O_CLOEXEC", 0))
    except ValueError:  # a NUL byte or a lone surrogate
        raise OSError(errno.EINVAL, "this is not a valid file name", repr(str(path))) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_regular(path)
        return os.fdopen(descriptor, "rb", buffering=buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_untrusted(path: Path, most_bytes: int) -> bytes:
    """The whole of a regular file."""
    with open_untrusted(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(most_bytes)}", str(path))
    return content


def check_untrusted(path: Path, most_bytes: int) -> None:
    """Checks a file that a library is about to open by name."""
    with open_untrusted(path, buffering=0) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {_size(most_bytes)}", str(path))


def reason(error: Exception) -> str:
    """Why a file could not be read, phrased to complete a sentence."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file but a folder, a pipe or a device", str(path))


def _size(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count:,} bytes"


DEEPEST = 100
"""Limit for values that are written again, walked or passed to a library; no useful schema or row is deeper."""


def parse_json(
    text: str | bytes,
    *,
    deepest: int | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a JSON document.

    Args:
        deepest: refuse lists and objects nested deeper than this; None allows what Python's parser can read.

    Raises:
        ValueError: it is not JSON (or not UTF-8, or has a number of thousands of digits), or is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if deepest is not None and text.count("[") + text.count("{") > deepest and _is_deeper(value, deepest):
        raise ValueError(f"it is nested more than {deepest} levels deep")
    return value


def read_record(path: Path, most_bytes: int) -> dict[str, Any]:
    """A JSON object that we keep; empty if there is none that can be read."""
    try:
        content = parse_json(read_untrusted(path, most_bytes))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def json_text(value: Any) -> str:
    """JSON that every parser takes, in UTF-8 too: NaN and infinities become null, half surrogate pairs U+FFFD."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError:
        text = json.dumps(sayable(value), ensure_ascii=False)
    return text


def without_half_pairs(text: str) -> str:
    """Text that UTF-8 can say: both halves of a surrogate pair are their character, and a half one is U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def sayable(value: Any) -> Any:
    """The same value as far as JSON in UTF-8 can say it."""
    if isinstance(value, str):
        return without_half_pairs(value)
    if isinstance(value, dict):
        return {sayable(key): sayable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [sayable(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_deeper(value: Any, deepest: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(deepest):
        entries = (entry for holder in level for entry in (holder.values() if isinstance(holder, dict) else holder))
        level = [entry for entry in entries if isinstance(entry, dict | list)]
        if not level:
            return False
    return True
