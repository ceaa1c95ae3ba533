"""The window: Qt front end of Switchyard."""

import ctypes
import sys

if sys.version_info < (3, 12):
    # PySide6 6.12 is built as if None were immortal, which it is only from Python 3.12 on: every call of a Qt method that
    # returns nothing takes one reference from None without having added one, and after some thousands of calls Python
    # 3.11 stops with "none_dealloc: deallocating None".  So many references are added here, once, before any Qt call,
    # that no session can use them up.  The reference count is the first field of every CPython object.
    ctypes.c_ssize_t.from_address(id(None)).value += 1 << 60
