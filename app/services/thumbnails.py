"""Small images of pictures, made one after the other off the GUI thread."""

from __future__ import annotations

import base64
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PySide6.QtCore import QBuffer, QByteArray, QObject, QSize
from PySide6.QtGui import QImage, QImageReader
from shiboken6 import isValid

from app.services.background import LatestTask
from app.services.pictures import fitting
from engine.common.chat import Picture
from engine.common.errors import EngineError
from engine.common.pictures import is_endless

MOST_KEPT = 32
"""Enough to show those of the next message again when one is taken away, and once more when it is sent."""
_HEAD_CHARS = (4096, 2**18)
"""How much of a picture, in base64, is read for its size alone: most begin with it."""


@dataclass(frozen=True, slots=True)
class Thumbnail:
    image: QImage
    pixels: QSize


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    picture: Picture
    most: QSize
    receiver: QObject
    done: Callable[[Thumbnail], object]


class Thumbnails(QObject):
    """Those asked for first come first; for a receiver that is deleted meanwhile none is made."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._wanted: deque[_Wanted] = deque()
        self._making = LatestTask(self)  # given its next function only when it is idle
        self._kept: OrderedDict[tuple[int, int, int], tuple[Picture, Thumbnail]] = OrderedDict()
        """By the identity of pictures, which are kept with them, and the size asked for: no picture is compared."""

    def ask(
        self, picture: Picture, most: QSize, receiver: QObject, done: Callable[[Thumbnail], object]
    ) -> Thumbnail | None:
        """The thumbnail if it is kept; else `done` is told of it, unless `receiver` is deleted before.

        Args:
            most: it fits into this, in real pixels.
        """
        kept = self._kept.get(_key(picture, most))
        if kept is not None:
            return kept[1]
        self._wanted.append(_Wanted(picture, most, receiver, done))
        self._make_next()
        return None

    def close(self) -> None:
        self._wanted.clear()
        self._making.close()

    def _make_next(self) -> None:
        while self._wanted and not self._making.is_busy:
            wanted = self._wanted.popleft()
            if not isValid(wanted.receiver):
                continue
            kept = self._kept.get(_key(wanted.picture, wanted.most))
            if kept is not None:  # made meanwhile, for another receiver
                wanted.done(kept[1])
            else:
                self._make(wanted)

    def _make(self, wanted: _Wanted) -> None:
        def failed(_error: Exception) -> None:
            self._on_made(wanted, Thumbnail(QImage(), QSize()))

        self._making.ask(
            lambda: made(wanted.picture, wanted.most), lambda thumbnail: self._on_made(wanted, thumbnail), failed
        )

    def _on_made(self, wanted: _Wanted, thumbnail: Thumbnail) -> None:
        self._kept[_key(wanted.picture, wanted.most)] = wanted.picture, thumbnail
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        if isValid(wanted.receiver):
            wanted.done(thumbnail)
        self._make_next()


def made(picture: Picture, most: QSize) -> Thumbnail:
    """A thumbnail, scaled while the picture is read, so that a large one takes little memory."""
    file = base64.b64decode(picture.data)
    if is_endless(file):
        return Thumbnail(QImage(), QSize())
    data = QByteArray(file)  # the buffer does not keep it
    buffer = QBuffer(data)
    reader = QImageReader(buffer)
    pixels = reader.size()
    if pixels.isValid():
        reader.setScaledSize(fitting(pixels, most))
    return Thumbnail(reader.read(), pixels)


def size_of(picture: Picture) -> QSize:
    for count in _HEAD_CHARS:
        data = QByteArray(base64.b64decode(picture.data[:count]))
        buffer = QBuffer(data)
        size = QImageReader(buffer).size()
        if size.isValid():
            return size
    return QSize()


def tokens_of(pictures: Iterable[Picture], model_path: str) -> int:
    """About how many tokens pictures cost with the model there; 0 of those whose size is not known or not taken."""
    sizes = (size_of(picture) for picture in pictures)
    return sum(_cost(model_path, size.width(), size.height()) for size in sizes if size.isValid())


@lru_cache(256)
def _cost(model_path: str, width: int, height: int) -> int:
    from engine.checkpoint.pictures import picture_tokens  # imported late: few chats have pictures

    try:
        return picture_tokens(Path(model_path), width, height)
    except (EngineError, OSError):  # the model says so itself once it is asked
        return 0


def _key(picture: Picture, most: QSize) -> tuple[int, int, int]:
    return id(picture), most.width(), most.height()
