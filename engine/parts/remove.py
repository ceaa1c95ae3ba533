"""Removes what Switchyard keeps outside its own folder: `python -m engine.parts.remove`, which uninstalling runs.

What can be made or fetched again always goes; models, and chats with settings, only if the user says so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from engine.common.installed import parts_dir
from engine.common.paths import cache_dir, config_dir, data_dir, log_dir, models_dir, standard_data_dir
from engine.common.plain_text import fill_streams
from engine.common.sizes import about

MADE_AGAIN = (
    *("banks", "converted", "locks", "measurements", "kernel-choice.json", "catalogue.json", "usage"),
    *("documents.sqlite3", "documents.sqlite3-wal", "documents.sqlite3-shm"),
)
"""In the data folder: converted weights, an earlier version's too, measurements, lists, and the index of documents in
chats."""
MODELS = ("models", "downloads")
CHATS = ("chats.sqlite3", "chats.sqlite3-wal", "chats.sqlite3-shm", "jobs", "sessions", "tuning")


def what_to_remove(*, models: bool, chats: bool) -> list[Path]:
    """Files and folders that are there and go.

    Args:
        models: also downloaded models.
        chats: also chats, jobs, recordings and settings.
    """
    names = [*MADE_AGAIN, *(MODELS if models else ()), *(CHATS if chats else ())]
    wanted = [cache_dir(), log_dir(), parts_dir(), *(data_dir() / name for name in names)]
    if chats:
        wanted.append(config_dir())
    if models and chats:
        wanted.append(standard_data_dir())
    # On Windows these folders are one, or lie in each other: what is kept is never inside of what goes.
    kept = [] if chats else [config_dir(), *(data_dir() / name for name in CHATS)]
    kept += [] if models else [data_dir() / name for name in MODELS]
    return [path for path in wanted if path.exists() and not any(each.is_relative_to(path) for each in kept)]


def remove(paths: Iterable[Path]) -> list[str]:
    """Removes them, and folders of ours that are empty then; returns what could not be removed, with the reason."""
    problems: list[str] = []

    def failed(_function: object, path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):
            problems.append(f"{path} ({getattr(error, 'strerror', None) or error})")

    for path in paths:
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path, failed)
        else:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failed(None, str(path), error)
    for folder in (data_dir(), standard_data_dir(), config_dir(), cache_dir().parent, log_dir().parent):
        if folder.name == "Switchyard":
            with suppress(OSError):  # something is left in it
                folder.rmdir()
    return problems


def _remove_tree(path: Path, failed: Callable[[object, str, BaseException], None]) -> None:
    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=failed)
    else:
        shutil.rmtree(path, onerror=lambda function, name, said: failed(function, name, said[1]))


def main(arguments: Sequence[str]) -> int:
    """Asks about models and chats if nobody has said, and there is somebody to ask; 0, or 1 if something is left."""
    parser = argparse.ArgumentParser(prog="uninstall", description="Removes Switchyard.", allow_abbrev=False)
    for name, what in (("models", "downloaded models"), ("chats", "chats, jobs and settings")):
        parser.add_argument(f"--{name}", action="store_true", default=None, help=f"remove {what}, too")
        parser.add_argument(f"--keep-{name}", dest=name, action="store_false", help=f"keep {what}")
    fill_streams()
    said = parser.parse_args(arguments)
    models = _asked(said.models, f"Remove your downloaded models, too ({about(_nbytes(models_dir()))})?")
    chats = _asked(said.chats, "Remove your chats, jobs and settings, too?")
    problems = remove(what_to_remove(models=models, chats=chats))
    for problem in problems:
        sys.stderr.write(f"Could not be removed: {problem}\n")
    kept = [name for name, goes in (("models", models), ("chats and settings", chats)) if not goes]
    if kept and data_dir().exists():
        sys.stdout.write(f"Your {' and '.join(kept)} stay in {data_dir()}.\n")
    return 1 if problems else 0


def _asked(said: bool | None, question: str) -> bool:
    if said is not None or not sys.stdin.isatty():
        return bool(said)
    sys.stdout.write(f"{question} [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
