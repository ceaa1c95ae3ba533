"""Locks on open files that die with their process, so a killed process never blocks another."""

from __future__ import annotations

import contextlib
import os
import sys

if sys.platform == "win32":
    import msvcrt

    def try_lock(descriptor: int) -> bool:
        """Takes the lock if it is free; returns whether it did."""
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def unlock(descriptor: int) -> None:
        """Releases the lock."""
        with contextlib.suppress(OSError):
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def try_lock(descriptor: int) -> bool:
        """Takes the lock if it is free; returns whether it did."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(descriptor: int) -> None:
        """Releases the lock."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)
