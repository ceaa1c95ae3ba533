"""Runs long reads and writes on a background thread, so that the engine thread can answer chats."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from engine.batch_files.job_watcher import JobWatcher

_LOOK_S = 0.02
_Result = TypeVar("_Result")

Between = Callable[[float], None]
"""Called by background work between two steps with its progress, 0 to 1. It returns when the work may continue, and
raises `StoppedError` if it must stop."""


class StoppedError(Exception):
    """The work was cancelled; it leaves nothing behind."""


def noop(_share: float) -> None:
    """A `Between` that never pauses or stops the work."""


def run_in_background(
    work: Callable[[Between], _Result],
    watcher: JobWatcher,
    on_share: Callable[[float], None],
    *,
    cancelled: Callable[[], bool] | None = None,
) -> _Result:
    """Runs `work` in the background and returns its result; it pauses while a chat has priority.

    Args:
        work: runs on another thread while the caller's waits here and yields to chats.
        on_share: called with the progress on the caller's thread, every few hundredths of a second.
        cancelled: whether to stop; defaults to the watcher's.

    Raises:
        StoppedError: it was cancelled.
        Exception: whatever `work` raises.
    """
    is_over, may_go_on, shall_stop = threading.Event(), threading.Event(), threading.Event()
    may_go_on.set()
    share = [0.0]
    results: list[_Result] = []
    errors: list[BaseException] = []

    def between(done: float) -> None:
        share[0] = done
        may_go_on.wait()
        if shall_stop.is_set():
            raise StoppedError

    def run() -> None:
        try:
            results.append(work(between))
        except BaseException as error:  # re-raised in the waiting thread
            errors.append(error)
        finally:
            is_over.set()

    thread = threading.Thread(target=run, name="batch-files", daemon=True)
    thread.start()
    try:
        while not is_over.wait(_LOOK_S):
            if (cancelled or watcher.cancelled)():
                shall_stop.set()
            elif watcher.should_yield():
                may_go_on.clear()
                watcher.give_way()
                may_go_on.set()
            on_share(share[0])
    finally:
        shall_stop.set()
        may_go_on.set()
        thread.join()
    if errors:
        raise errors[0]
    return results[0]
