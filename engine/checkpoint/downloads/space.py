"""Room on the disk for a file before its bytes come, so that a disk does not turn out full after hours.

Each system has its own way to reserve a file's space without writing it. Where none works (a network's file system, a
compressed folder, another system), the file only gets its size, and the transfer looks at the free space meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

from engine.common.files import is_full

_F_PREALLOCATE, _F_ALLOCATEALL, _F_PEOFPOSMODE = 42, 4, 3
"""Of macOS: <fcntl.h>."""
_END_OF_FILE_INFO = 6
_WINDOWS_FULL = (39, 112)
"""ERROR_HANDLE_DISK_FULL, ERROR_DISK_FULL."""


def allocated(path: Path) -> int:
    """Bytes that a file has on the disk already."""
    status = path.stat()
    return int(getattr(status, "st_blocks", -(-status.st_size // 512))) * 512


def reserve(path: Path, size: int) -> bool:
    """Gives a file its size, and where the file system can do it at once also its space; returns whether it did.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    with open(path, "r+b", buffering=0) as file:
        how = _WAYS.get(sys.platform)
        if how is not None and size:
            try:
                how(file, size)
            except OSError as error:
                if is_full(error):
                    raise
            else:
                return True
        if os.fstat(file.fileno()).st_size != size:
            file.truncate(size)
        return False


def _on_linux(file: FileIO, size: int) -> None:
    # Not os.posix_fallocate: where a file system cannot, that one writes into every block.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file.name))


def _on_macos(file: FileIO, size: int) -> None:
    """`F_PREALLOCATE` counts from where the file's space ends."""
    missing = size - allocated(Path(str(file.name)))
    if missing > 0:
        fcntl: Any = import_module("fcntl")
        fcntl.fcntl(file.fileno(), _F_PREALLOCATE, struct.pack("=Iiqqq", _F_ALLOCATEALL, _F_PEOFPOSMODE, 0, missing, 0))
    if os.fstat(file.fileno()).st_size != size:
        file.truncate(size)


def _on_windows(file: FileIO, size: int) -> None:
    """Moves the file's end, for which NTFS takes the space at once; `truncate` there writes zeros up to it."""
    if os.fstat(file.fileno()).st_size == size:
        return
    system: Any = ctypes
    kernel = system.WinDLL("kernel32", use_last_error=True)
    handle = ctypes.c_void_p(import_module("msvcrt").get_osfhandle(file.fileno()))
    end = ctypes.c_int64(size)
    if not kernel.SetFileInformationByHandle(handle, _END_OF_FILE_INFO, ctypes.byref(end), 8):
        code = int(system.get_last_error())
        number = errno.ENOSPC if code in _WINDOWS_FULL else errno.EIO
        raise OSError(number, f"the file's end cannot be moved (Windows error {code})", str(file.name))


_WAYS: dict[str, Callable[[FileIO, int], None]] = {"linux": _on_linux, "darwin": _on_macos, "win32": _on_windows}
