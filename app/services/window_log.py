"""The log of the window's own process, with what Qt has to say in it."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from pathlib import Path

from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler

_log = logging.getLogger("switchyard.qt")
_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


def open_window_log(folder: Path) -> None:
    """Logs to `folder`/window.log, half a megabyte at most and one older file; without it where that fails."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            folder / "window.log", maxBytes=2**19, backupCount=1, encoding="utf-8", delay=True
        )
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
