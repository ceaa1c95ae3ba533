"""Processes that services run beside the window."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from PySide6.QtCore import QMetaMethod, QObject, QProcess, QProcessEnvironment


def child(
    parent: QObject,
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    ended: Callable[..., object],
    not_started: Callable[[], object],
    reads: Callable[[], object] | None = None,
    confined: bool = False,
) -> QProcess:
    """A process that is started by `start()`; what it writes to stderr is for nobody.

    Args:
        variables: of its environment, beside those of this process.
        ended: gets its exit code and status.
        reads: called when it has written to stdout; None: that is for nobody either.
        confined: it gets these variables and no others.
    """
    process = QProcess(parent)
    environment = QProcessEnvironment() if confined else QProcessEnvironment.systemEnvironment()
    for name, value in variables.items():
        environment.insert(name, value)
    process.setProcessEnvironment(environment)
    process.setProgram(command[0])
    process.setArguments(list(command[1:]))
    process.setStandardErrorFile(QProcess.nullDevice())
    if reads is None:
        process.setStandardOutputFile(QProcess.nullDevice())
    else:
        process.readyReadStandardOutput.connect(reads)
    process.finished.connect(ended)

    def on_error(error: QProcess.ProcessError) -> None:
        if error is QProcess.ProcessError.FailedToStart:
            not_started()

    process.errorOccurred.connect(on_error)
    return process


def ask_to_end(process: QProcess) -> None:
    """On Windows, where a program without a window hears nothing, it is killed."""
    if sys.platform == "win32":
        process.kill()
    else:
        process.terminate()


def end_child(process: QProcess, patience_ms: int) -> None:
    """Asks it to end and waits for that, and kills it after a while: for when the window closes."""
    ask_to_end(process)
    if not process.waitForFinished(patience_ms):
        process.kill()
        process.waitForFinished(patience_ms)


def delete_child(process: QProcess) -> None:
    """Deletes it later, and hears nothing of it any more.

    What its signals call may hold the last reference to its parent, and is let go of now: while the process is being
    deleted, the parent would delete it once more.
    """
    for signal in (process.readyReadStandardOutput, process.finished, process.errorOccurred):
        if process.isSignalConnected(QMetaMethod.fromSignal(signal)):
            signal.disconnect()
    process.deleteLater()
