"""Opens untrusted files: regular files only, up to a size limit, without ever blocking.

A model's folder, a file of rows or an exported chat may contain a pipe, a device such as `/dev/zero`, a link to one, or
a file of many gigabytes where a few kilobytes belong. Everything that reads such a file opens it here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# `open` would block forever on a pipe without a writer; a terminal must not become our controlling terminal.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


def open_foreign(path: Path, *, buffering: int = -1) -> BinaryIO:
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


def read_foreign(path: Path, most_bytes: int) -> bytes:
    """The whole of a regular file.

    Raises:
        OSError: as `open_foreign`, and if it holds more than `most_bytes`: `strerror` says so.
    """
    with open_foreign(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(most_bytes)}", str(path))
    return content


def check_foreign(path: Path, most_bytes: int) -> None:
    """Checks a file that a library is about to open by name.

    Raises:
        OSError: as `read_foreign`.
    """
    with open_foreign(path, buffering=0) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {_size(most_bytes)}", str(path))


def reason(error: Exception) -> str:
    """Why a file could not be read, phrased to complete a sentence."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file but a folder, a pipe or a device", str(path))


def _size(count: int) -> str:
    return f"{count / 2**20:.3g} MiB" if count >= 2**20 else f"{count:,} bytes"
