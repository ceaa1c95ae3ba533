"""Why the engine process ended, in words; and the log file for its stderr."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from PySide6.QtCore import QCoreApplication

from engine.common import installed
from engine.common.errors import EngineError
from engine.common.files import private_file, private_folder
from engine.common.integrity import give_up_damaged

translate = QCoreApplication.translate

MAX_LOG_BYTES = 2 * 2**20


def death_sentence(code: int, *, crashed: bool) -> str:
    """One sentence on a worker that ended unexpectedly.

    Args:
        code: QProcess's exit code; if `crashed`, the signal's number on POSIX and an NTSTATUS on Windows.
    """
    if not crashed:
        return translate("EngineClient", "The engine exited unexpectedly (code {0}); see its log for details.").format(
            code
        )
    if sys.platform == "win32":
        return translate("EngineClient", "The engine crashed (status {0}).").format(f"0x{code & 0xFFFFFFFF:08X}")
    if code == signal.SIGKILL:
        return translate("EngineClient", "The engine was killed (signal 9), perhaps for lack of memory.")
    if code == signal.SIGILL:
        return translate(
            "EngineClient", "The engine crashed (signal 4): this processor lacks an instruction that it used."
        )
    try:
        name = signal.strsignal(code) or "?"
    except ValueError:
        name = "?"
    return translate("EngineClient", "The engine crashed (signal {0}: {1}).").format(code, name)


def is_packaged() -> bool:
    """Whether the engine is a part of its own, which may lose files."""
    try:
        return installed.bundle() is not None
    except EngineError:
        return False


def engine_damage() -> str:
    """What to say if the engine has lost files, which keeps it from starting; it is not used any more then."""
    part = installed.current_engine()
    damage = give_up_damaged(part.folder) if part is not None else None
    return damage.message if damage is not None else ""


def keep_log_small(log: Path) -> bool:
    """Create the log's folder, and rotate a log that has grown too large; returns whether it can be written."""
    try:
        private_folder(log.parent)
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
        private_file(log)
        with log.open("ab"):
            return True
    except OSError:
        return False
