"""The window process's log, including Qt's messages."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler

from engine.common.files import PrivateLog, private_folder

_log = logging.getLogger("switchyard.qt")
_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


def open_window_log(folder: Path) -> None:
    """Logs to `folder`/window.log, up to half a megabyte plus one older file; does without if that fails."""
    with contextlib.suppress(OSError):
        private_folder(folder)
        handler = PrivateLog(folder / "window.log", max_bytes=2**19, older=1)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger("switchyard")
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    qInstallMessageHandler(_on_qt_message)


def close_window_log() -> None:
    """Undoes `open_window_log`."""
    qInstallMessageHandler(None)
    root = logging.getLogger("switchyard")
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.propagate = True


def _on_qt_message(kind: QtMsgType, context: QMessageLogContext, message: str) -> None:
    _log.log(_LEVELS.get(kind, logging.WARNING), "%s: %s", context.category or "qt", message)
