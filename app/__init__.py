"""The Qt front end.  Never imports torch or transformers."""

from __future__ import annotations

import ctypes
import sys

# PySide6 6.12.0: every `Signal.emit` returns True without taking a reference to it.  From Python 3.12 on True is
# immortal; before, it is freed after a few thousand emits and the interpreter aborts ("bool_dealloc").  Here it
# gets more references than can ever be dropped.  tests/app/test_signal_emit.py says when this can go.
if sys.version_info < (3, 12) and sys.implementation.name == "cpython":
    ctypes.c_ssize_t.from_address(id(True)).value += 1 << 40
