"""Prepared files that are read while Python still imports the engine: those that the last such start read or wrote.

Which files a model takes is known once its headers are read and its memory is planned, and all that takes torch.  So
each start notes what it has read or kept, and the next one that is asked for the same begins with that.  A wrong guess
costs nothing but the reading: what nobody takes is given back.  No torch here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from engine.checkpoint.names import resolve
from engine.checkpoint.usage import where
from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.foreign import parse_json, read_foreign
from engine.common.paths import cache_dir
from engine.experts.file_image import FileImage
from engine.hardware.surroundings import available_ram

_LEFT_FREE = 2**30
"""Bytes of RAM that must be free besides: nothing has been planned yet."""
_MOST_BYTES = 2**16
_log = logging.getLogger(__name__)


class EarlyReads:
    """What a process reads before its engine is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_begun = False
        self._starting: threading.Thread | None = None
        self._images: dict[Path, FileImage] = {}

    def begin(self, model: str, asked: str) -> bool:
        """Begins to read what the last start with these settings has read, on threads.  Once: a process that has its
        engine has other things in RAM and to do."""
        with self._lock:
            if self._has_begun:
                return False
            self._has_begun = True
            self._starting = threading.Thread(target=self._begin, args=(model, asked), name="early-reads", daemon=True)
            self._starting.start()
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that they take, which whoever plans memory need not find again."""
        self._started()
        with self._lock:
            return sum(image.nbytes for image in self._images.values())

    def take(self, path: Path) -> FileImage:
        """The image of this file, begun early or now; the caller closes it."""
        self._started()
        with self._lock:
            image = self._images.pop(path, None)
        if image is not None:
            if image.is_of(path):
                return image
            image.close()
        return FileImage(path)

    def drop(self) -> None:
        self._started()
        with self._lock:
            images, self._images = list(self._images.values()), {}
        for image in images:
            image.close()

    def _started(self) -> None:
        with self._lock:
            starting, self._starting = self._starting, None
        if starting is not None:
            starting.join()

    def _begin(self, model: str, asked: str) -> None:
        for path in remembered(model, asked):
            try:
                if path.stat().st_size + _LEFT_FREE > available_ram():
                    break
                image = FileImage(path)
            except (OSError, MemoryError) as error:
                _log.info("%s is not read early: %s", path, error)
                continue
            self._images[path] = image


EARLY_READS = EarlyReads()
"""Of this process."""


def remember(model: str, asked: str, files: Iterable[Path]) -> None:
    """Notes what the next start that is asked for this model and these settings can read; never fails."""
    with contextlib.suppress(OSError, EngineError, ValueError):
        note = _note_of(model)
        record = json.dumps({"asked": asked, "files": [str(file) for file in files]})
        if not note.exists() or note.read_text(encoding="utf-8") != record:
            write_private(note, record)


def remembered(model: str, asked: str) -> list[Path]:
    """The files of the last start that was asked for the same, those that are there."""
    try:
        found = parse_json(read_foreign(_note_of(model), _MOST_BYTES))
        files = [Path(file) for file in found["files"]] if found["asked"] == asked else []
        return [file for file in files if file.is_file()]
    except (OSError, EngineError, ValueError, LookupError, TypeError):
        return []


def _note_of(model: str) -> Path:
    return cache_dir() / "starts" / f"{where(Path(resolve(model)))}.json"
