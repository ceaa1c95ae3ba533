"""Python 3.11 with PySide6 6.12, whose void methods take references from None: see app/__init__.py."""

from __future__ import annotations

import subprocess
import sys

_MANY_CALLS = """
import app
from PySide6.QtCore import QObject
thing = QObject()
for _ in range(100_000):
    thing.setObjectName("x")
print("still here")
"""


def test_a_hundred_thousand_calls_into_qt() -> None:
    done = subprocess.run([sys.executable, "-c", _MANY_CALLS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("still here\n", "", 0)
