"""When a model was last used on this machine, and how fast it answered: a small file per model in the data folder.

A file per model, replaced as a whole: several processes may write at once, and the last one wins.

Who uses a model: many processes may read it at once, but it is moved or removed only by one that is alone with it.

Everybody puts a locked file of their own into the model's folder of locks, in the data folder: a store of another
program may be read-only, and is not ours to write to. Only then they look at the others' files, so of two that begin at
the same time at least one sees the other. A lock dies with its process; a file without a lock means nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, locked_file, new_folder, remove_unlocked, write_private
from engine.common.paths import data_dir
from engine.common.untrusted import parse_json, read_untrusted

LEAST_TOKENS = 16
"""An answer of fewer tokens says nothing about speed."""
_ANSWERS = 9
_MOST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Usage:
    """What is remembered of one model.

    Attributes:
        last_used: seconds since the epoch; None if never.
        how: on which device and in which precision it ran then.
        tokens_per_s: decode speeds of the last answers that way, oldest first.
    """

    last_used: float | None = None
    how: str = ""
    tokens_per_s: tuple[float, ...] = ()

    @property
    def measured_tokens_per_s(self) -> float | None:
        """The median of the last answers; None before the first."""
        return median(self.tokens_per_s) if self.tokens_per_s else None


def where(model: Path) -> str:
    """Twelve hex digits that stand for a checkpoint's place: in the names of what is kept about it elsewhere."""
    return hashlib.sha256(str(model.resolve()).encode(errors="surrogateescape")).hexdigest()[:12]


def model_at(place: str) -> Path | None:
    """The checkpoint whose place this stands for (`where`), if it was ever used."""
    try:
        return Path(str(parse_json(read_untrusted(data_dir() / "usage" / f"{place}.json", _MOST_BYTES))["model"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def read_usage(model: Path) -> Usage:
    """What is remembered of the checkpoint at a path; nothing if there is no readable record."""
    try:
        found = parse_json(read_untrusted(_file(model), _MOST_BYTES))
        used, how, speeds = found["last_used"], str(found["how"]), found["tokens_per_s"]
        return Usage(float(used), how, tuple(float(speed) for speed in speeds if 0 < speed < 1e6)[-_ANSWERS:])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return Usage()


def is_any_known() -> bool:
    """Whether any model was ever used on this machine."""
    return any(_file(Path()).parent.glob("*.json"))


def note_use(model: Path, how: str, tokens_per_s: float = 0.0, tokens: int = 0) -> None:
    """Notes that a model was loaded, or answered at this speed.  Never fails: it is not worth an answer.

    Args:
        how: the device and the precision; speeds of another way are forgotten.
        tokens: of the answer.
    """
    before = read_usage(model)
    speeds = before.tokens_per_s if before.how == how else ()
    if tokens >= LEAST_TOKENS and tokens_per_s > 0:
        speeds = (*speeds, tokens_per_s)[-_ANSWERS:]
    record = {"model": str(model), "last_used": time.time(), "how": how, "tokens_per_s": speeds}
    with contextlib.suppress(OSError, ValueError):
        write_private(_file(model), json.dumps(record) + "\n")


def move_usage(model: Path, to: Path) -> None:
    """Takes the record of a model along to its new place."""
    with contextlib.suppress(OSError):
        _file(model).replace(_file(to))


def forget_usage(model: Path) -> None:
    """Removes the record of a model that is gone."""
    with contextlib.suppress(OSError):
        _file(model).unlink(missing_ok=True)


def _file(model: Path) -> Path:
    return data_dir() / "usage" / f"{where(model)}.json"


_READER, _ALONE = "reader-", "alone-"


@contextlib.contextmanager
def reading(model: Path) -> Iterator[None]:
    """Uses the checkpoint at a path for the block.

    Where no lock can be kept (a read-only data folder), it is used all the same.

    Raises:
        EngineError: `BUSY` while it is being moved or removed.
    """
    with contextlib.ExitStack() as held:
        try:
            mine = held.enter_context(_announced(model, _READER))
        except OSError:
            mine = None
        if mine is not None and _others(mine, _ALONE):
            raise EngineError(ErrorCode.BUSY, f"{model.name} is being moved or removed: wait until that is done.")
        yield


@contextlib.contextmanager
def exclusive_use(model: Path) -> Iterator[None]:
    """Makes sure that nobody else uses the checkpoint at a path, nor begins to during the block.

    Raises:
        EngineError: `BUSY` if somebody does.
    """
    with contextlib.ExitStack() as held:
        with disk_errors_explained(data_dir()):
            mine = held.enter_context(_announced(model, _ALONE))
        if _others(mine, _ALONE):
            raise EngineError(
                ErrorCode.BUSY, f"{model.name} is being moved or removed already: wait until that is done."
            )
        if _others(mine, _READER):
            raise EngineError(
                ErrorCode.BUSY,
                f"{model.name} is in use: unload it in Switchyard's window, end other programs with it, and try again.",
            )
        yield


def _locks_of(model: Path) -> Path:
    return data_dir() / "locks" / where(model)


@contextlib.contextmanager
def _announced(model: Path, prefix: str) -> Iterator[Path]:
    """A locked file of ours in the model's folder of locks."""
    folder, path = _locks_of(model), None
    new_folder(folder)
    try:
        with locked_file(folder, prefix) as path:
            yield path
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _others(mine: Path, prefix: str) -> bool:
    """Whether others hold such a lock; files of killed processes are removed."""
    files = [file for file in mine.parent.iterdir() if file.name.startswith(prefix) and file != mine]
    return any(not remove_unlocked(file) for file in files)
