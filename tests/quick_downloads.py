"""Downloads in small parts and with little patience, for tests against servers of this machine."""

import os

import pytest

from engine.checkpoint.downloads import parts, queue, source, transfer
from engine.checkpoint.downloads.parts import Waits


def make_quick(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    """Until the test ends, parts have so many bytes, and nothing waits for long."""
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power is cut here, and the disk may be slow
    monkeypatch.setattr(Waits, "FIRST_S", 0.01)
    monkeypatch.setattr(Waits, "LONGEST_S", 0.05)
    monkeypatch.setattr(source, "STALL_S", 0.5)
    monkeypatch.setattr(transfer, "_SILENT_S", 0.1)
    monkeypatch.setattr(transfer, "_LOOK_S", 0.01)
    monkeypatch.setattr(queue, "_LOOK_S", 0.02)
    monkeypatch.setattr(queue, "_REPORT_S", 0.02)
