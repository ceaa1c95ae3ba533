"""Reading and writing that takes long, in a thread beside the engine's: chats are answered meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from engine.batch_files.job_watcher import JobWatcher

_LOOK_S = 0.02
_Result = TypeVar("_Result")

Between = Callable[[float], None]
"""Called by the work between two of its steps with the share that is done, 0 to 1: it returns when the work may go on,
and raises `StoppedError` when it shall not."""


class StoppedError(Exception):
    """Nobody wants the work any more; it leaves nothing behind."""


def on_and_on(_share: float) -> None:
    """For callers that never stop the work."""


def aside(
    work: Callable[[Between], _Result],
    watcher: JobWatcher,
    on_share: Callable[[float], None],
    *,
    cancelled: Callable[[], bool] | None = None,
) -> _Result:
    """What `work` returns; while somebody has priority it rests, so that their answer has the machine.

    Args:
        work: runs in another thread while the caller's waits here and gives way.
        on_share: told in the caller's thread how much is done, every few hundredths of a second.
        cancelled: whether to stop; the watcher's own if not given.

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
        except BaseException as error:  # raised again where somebody waits for it
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
