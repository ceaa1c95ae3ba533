"""The window: Qt front end of Switchyard.  Never imports torch or transformers."""

import ctypes
import sys

if sys.version_info < (3, 12):
    # PySide6 6.12 is built as if None, True and False were immortal, which they are only from Python 3.12 on: every
    # call of a Qt method that returns nothing takes a reference from None, and every `Signal.emit` one from True,
    # without having added one.  After some thousands of calls Python 3.11 stops with "none_dealloc" or "bool_dealloc".
    # So many references are added here, once, before any Qt call, that no session can use them up.  The reference
    # count is the first field of every CPython object.
    for _constant in (None, True, False):
        ctypes.c_ssize_t.from_address(id(_constant)).value += 1 << 60
