"""What a test may not leave behind: threads, child processes, visible windows, temporary files.

`snapshot()` before a test, `leaks_since()` after it.  Things that are on their way out get a moment to go: a pool
that was shut down, a process that was told to end.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 3.0

# Threads that libraries keep for the life of the process.  Everything else is ours, daemon or not.
_LIBRARY_THREADS = (
    "pytest_timeout",
    "tqdm_monitor",  # tqdm's bar monitor, started at the first bar
    "InductorSubproc",
)
# Processes that are kept as long as this one: a library's, and those that strangers' texts are read in.
_KEPT_PROCESSES = ("multiprocessing.resource_tracker", "engine.batch_files.document_child")
# What libraries keep in the temporary folder for the life of the process.
_LIBRARY_FILES = ("torchinductor_",)


@dataclass(frozen=True)
class Snapshot:
    threads: frozenset[int]
    children: frozenset[int]
    files: frozenset[Path]


def snapshot() -> Snapshot:
    return Snapshot(
        threads=frozenset(threads()),
        children=frozenset(_children()),
        files=frozenset(_temporary_files()),
    )


def leaks_since(before: Snapshot) -> list[str]:
    """One line for each thing that is there now and was not before."""
    checks: tuple[tuple[str, Callable[[], dict[Any, str]], frozenset[Any]], ...] = (
        ("thread", threads, before.threads),
        ("child process", _children, before.children),
        ("temporary file", _temporary_files, before.files),
        ("visible window", _visible_windows, frozenset()),
        ("Qt pool job", _qt_pool_jobs, frozenset()),
    )
    leaks: list[str] = []
    deadline = time.monotonic() + GRACE_S
    for kind, look, known in checks:
        while (left := {key: name for key, name in look().items() if key not in known}) and time.monotonic() < deadline:
            time.sleep(0.02)
        leaks += [f"{kind}: {name}" for name in left.values()]
    return leaks


def threads() -> dict[int, str]:
    """What libraries keep for the life of the process is left out; keys are ids of the thread objects."""
    return {
        id(thread): f"{thread.name} ({type(thread).__name__}{', daemon' if thread.daemon else ''})"
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and not thread.name.startswith(_LIBRARY_THREADS)
        and type(thread).__name__ not in ("TMonitor", "_DummyThread")
    }


def wait_for_threads(before: Collection[int]) -> None:
    """Waits, for as long as things may take to go, until no thread is left but these."""
    deadline = time.monotonic() + GRACE_S
    while not threads().keys() <= set(before) and time.monotonic() < deadline:
        time.sleep(0.002)


def _children() -> dict[int, str]:
    found = {}
    for pid in _descendants():
        try:
            child = psutil.Process(pid)
            command = " ".join(child.cmdline())
            is_kept = any(name in command for name in _KEPT_PROCESSES) or _is_of_untrusted_text(child, command)
            if child.status() != psutil.STATUS_ZOMBIE and not is_kept:
                found[child.pid] = f"{child.pid} {command[:200]}"
        except psutil.Error:  # gone meanwhile
            continue
    return found


def _is_of_untrusted_text(child: psutil.Process, command: str) -> bool:
    """Whether it is the process of templates and tokenizers that this one keeps, or that a child of it has."""
    if "engine.untrusted_text.child" not in command:
        return False
    module = sys.modules.get("engine.untrusted_text.process")
    return child.ppid() != os.getpid() or (module is not None and child.pid == module.UNTRUSTED_TEXT.pid)


def _descendants() -> list[int]:
    """Children of this process and theirs, to any depth.

    Linux says whose child each process is.  Elsewhere one has to look at all processes of the machine, which takes
    milliseconds, twice in every test.
    """
    if not Path(f"/proc/self/task/{threading.get_native_id()}/children").exists():
        return [child.pid for child in psutil.Process().children(recursive=True)]
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        tasks = f"/proc/{parents.pop()}/task"
        try:
            for thread in os.listdir(tasks):
                with open(f"{tasks}/{thread}/children") as children:
                    new = [int(pid) for pid in children.read().split()]
                found += new
                parents += new
        except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
            continue
    return found


def _temporary_files() -> dict[Path, str]:
    folder = Path(tempfile.gettempdir())
    return {path: str(path) for path in folder.iterdir() if not path.name.startswith(_LIBRARY_FILES)}


def _visible_windows() -> dict[int, str]:
    widgets = sys.modules.get("PySide6.QtWidgets")
    if widgets is None or not isinstance(widgets.QApplication.instance(), widgets.QApplication):
        return {}
    return {
        id(window): f"{type(window).__name__} {window.windowTitle()!r}"
        for window in widgets.QApplication.topLevelWidgets()
        if window.isVisible()
    }


def _qt_pool_jobs() -> dict[str, str]:
    core = sys.modules.get("PySide6.QtCore")
    running = core.QThreadPool.globalInstance().activeThreadCount() if core is not None else 0
    return {"global": f"{running} still running in QThreadPool.globalInstance()"} if running else {}
