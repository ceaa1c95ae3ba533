"""What is kept of faults: reports of crashes, and the window's log."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import platform
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import TextIO

import psutil
from PySide6.QtCore import QMessageLogContext, QtMsgType, qInstallMessageHandler

from engine.common.anonymous import without_names
from engine.common.errors import EngineError
from engine.common.files import PrivateLog, private_file, private_folder, write_private

_qt_log = logging.getLogger("switchyard.qt")
_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


def open_window_log(folder: Path) -> None:
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
    qInstallMessageHandler(None)
    root = logging.getLogger("switchyard")
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    root.propagate = True


def _on_qt_message(kind: QtMsgType, context: QMessageLogContext, message: str) -> None:
    _qt_log.log(_LEVELS.get(kind, logging.WARNING), "%s: %s", context.category or "qt", message)


_log = logging.getLogger("switchyard.crash")
_PREFIX, _FAULT_PREFIX = "crash-", "fault-"
_MAX_REPORTS = 5


class CrashReports:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fault_file: TextIO | None = None
        self._previous_hooks = (sys.excepthook, threading.excepthook)

    def install(self) -> None:
        sys.excepthook = self._on_exception
        threading.excepthook = lambda args: self._on_exception(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )
        with contextlib.suppress(OSError):
            private_folder(self._folder)
            fault = self._folder / f"{_FAULT_PREFIX}{os.getpid()}.txt"
            private_file(fault)
            self._fault_file = fault.open("w", encoding="utf-8")
            self._fault_file.write(_header("native crash"))
            self._fault_file.flush()
            faulthandler.enable(self._fault_file)

    def uninstall(self) -> None:
        sys.excepthook, threading.excepthook = self._previous_hooks
        if self._fault_file is not None:
            faulthandler.disable()
            self._fault_file.close()
            with contextlib.suppress(OSError):
                Path(self._fault_file.name).unlink()
            self._fault_file = None

    def pending(self) -> str:
        texts: list[str] = []
        for path in self._left_behind():
            with contextlib.suppress(OSError):
                text = path.read_text(encoding="utf-8", errors="replace")
                # A killed process leaves only the header: nothing to report.
                if path.name.startswith(_PREFIX) or "Fatal Python error" in text or "Windows fatal" in text:
                    texts.append(without_names(text))
                else:
                    path.unlink()
        return "\n".join(texts[-_MAX_REPORTS:])

    def dismiss(self) -> None:
        for path in self._left_behind():
            with contextlib.suppress(OSError):
                path.unlink()

    def _left_behind(self) -> list[Path]:
        own = f"{_FAULT_PREFIX}{os.getpid()}.txt"
        found = [*self._folder.glob(f"{_PREFIX}*.txt"), *self._folder.glob(f"{_FAULT_PREFIX}*.txt")]
        ended = [path for path in found if path.name != own and not _is_running(path)]
        return sorted(ended, key=_modified)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            self._previous_hooks[0](kind, error, trace)
            return
        text = _header("unhandled error") + describe(error, trace)
        _log.error("unhandled error\n%s", text)
        with contextlib.suppress(OSError):
            private_folder(self._folder)
            reports = sorted(self._folder.glob(f"{_PREFIX}*.txt"), key=_modified)
            if len(reports) < _MAX_REPORTS:  # an error on every timer tick must not fill the disk
                name = f"{_PREFIX}{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}-{len(reports)}.txt"
                write_private(self._folder / name, without_names(text))


def describe(error: BaseException, trace: TracebackType | None) -> str:
    """The error's type and traceback, innermost frame last, without its message."""
    frames = traceback.extract_tb(trace)
    lines = [f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}' for frame in frames]
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    lines.append(f"{kind} [{error.code}]" if isinstance(error, EngineError) else kind)
    if error.__cause__ is not None:
        lines += ["caused by:", describe(error.__cause__, error.__cause__.__traceback__).rstrip()]
    return "\n".join(lines) + "\n"


def _header(what: str) -> str:
    qt = sys.modules.get("PySide6")
    return (
        f"Switchyard, {what}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        f"Python {platform.python_version()}, Qt {getattr(qt, '__version__', 'not loaded')}, "
        f"{platform.system()} {platform.release()}, {platform.machine()}\n"
    )


def _is_running(path: Path) -> bool:
    if not path.name.startswith(_FAULT_PREFIX):
        return False
    try:
        process_id = int(path.stem.removeprefix(_FAULT_PREFIX))
        return psutil.Process(process_id).create_time() <= path.stat().st_mtime + 2
    except (ValueError, OSError, psutil.Error):
        return False


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
