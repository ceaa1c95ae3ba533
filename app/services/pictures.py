"""Pictures for models that see, here and on other servers.

They are read from files or the clipboard off the GUI thread, made small enough, and without what a camera wrote into
them, such as the place.

They become PNG or JPEG, which every server reads: some read no WebP, and only a GIF's first picture.
"""

from __future__ import annotations

import base64
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PySide6.QtCore import QBuffer, QByteArray, QCoreApplication, QMimeData, QObject, QSize, Qt, QUrl
from PySide6.QtGui import QColor, QImage, QImageReader, QPainter, QTransform
from shiboken6 import isValid

from app.services.background import LatestTask, TaskQueue
from engine.common.chat import Picture
from engine.common.errors import EngineError
from engine.common.pictures import (
    MOST_ALL_BYTES,
    MOST_PICTURES,
    MOST_PIXELS,
    SUFFIXES,
    is_endless,
    kind_of,
    media_of,
    orientation_of,
)
from engine.common.sizes import about
from engine.common.untrusted import read_untrusted, reason

MOST_SIDE_PX = 2048
"""A larger picture is scaled down: most models see no more of it, and for the others it is some thousand tokens."""
MOST_FILE_BYTES = 100 * 10**6
MOST_PNG_BYTES = 1_500_000
JPEG_QUALITY = 90
OTHER_SUFFIXES = (".heic", ".heif", ".avif", ".svg", ".svgz", ".tif", ".tiff", ".bmp", ".jxl", ".jp2", ".psd")
"""Pictures that are refused by name."""
_FILE_MANAGERS = ("x-special/nautilus-clipboard", "copy", "cut")
_JPEG_TIMES = 3
"""As many pixels as of other kinds: it is scaled while it is read."""
_TURNS = {
    2: (True, 0),
    3: (False, 180),
    4: (True, 180),
    5: (True, 270),
    6: (False, 90),
    7: (True, 90),
    8: (False, 270),
}
"""By EXIF's orientation, which Qt reads of JPEG files alone: whether it is mirrored, and degrees to turn it then."""
_MOST = QSize(MOST_SIDE_PX, MOST_SIDE_PX)
_FORMATS = ("png", "jpeg", "webp", "gif")

translate = QCoreApplication.translate

Source = Path | QImage


class NotAPictureError(Exception):
    """The argument is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    pictures: tuple[Picture, ...]
    problems: tuple[str, ...]


class Pictures(QObject):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._doing = TaskQueue(self)

    def prepare(self, sources: Sequence[Source], beside: Sequence[Picture], done: Callable[[Prepared], object]) -> None:
        """`done` is told of the pictures that may go with those that a message has already.

        Args:
            beside: all pictures of the chat: a request takes only so many bytes.
        """
        some, all_there = tuple(sources), sum(len(each.data) for each in beside) * 3 // 4
        self._doing.add(lambda: _prepared(some, all_there), done)

    @property
    def is_busy(self) -> bool:
        return self._doing.is_busy

    def close(self) -> None:
        self._doing.close()


def sources_in(data: QMimeData) -> list[Source]:
    """The files that are dragged or pasted, of any kind, or a picture that is no file; a text with a picture of it is a
    text."""
    urls = data.urls() or _urls_in(data.text())
    found: list[Source] = [Path(url.toLocalFile()) for url in urls if url.isLocalFile()]
    if not found and data.hasImage() and not data.hasText():
        image = data.imageData()
        found = [image] if isinstance(image, QImage) and not image.isNull() else []
    return found


def _urls_in(text: str) -> list[QUrl]:
    """Files that a file manager copies as a text."""
    lines = text.split("\n") if "file:" in text else []
    named = [line.strip() for line in lines if line.strip() not in ("", *_FILE_MANAGERS)]
    return [QUrl(line) for line in named] if all(line.startswith("file:/") for line in named) else []


def is_picture(source: Source) -> bool:
    return isinstance(source, QImage) or source.suffix.lower() in SUFFIXES + OTHER_SUFFIXES


def too_many() -> str:
    return translate("Pictures", "A message takes up to {0} pictures.").format(MOST_PICTURES)


def fitting(size: QSize, most: QSize) -> QSize:
    if size.width() <= most.width() and size.height() <= most.height():
        return size
    return size.scaled(most, Qt.AspectRatioMode.KeepAspectRatio).expandedTo(QSize(1, 1))


def _prepared(sources: Sequence[Source], nbytes: int) -> Prepared:
    pictures: list[Picture] = []
    problems: list[str] = []
    for source in sources:
        try:
            picture = _encoded(source if isinstance(source, QImage) else _read(source), _is_photo(source))
        except NotAPictureError as error:
            problems.append(str(error))
            continue
        nbytes += len(picture.data) * 3 // 4
        if nbytes > MOST_ALL_BYTES:
            words = translate("Pictures", "A chat takes {0} of pictures: start a new chat for more.")
            problems.append(words.format(about(MOST_ALL_BYTES)))
            break
        pictures.append(picture)
    return Prepared(tuple(pictures), tuple(dict.fromkeys(problems)))


def _is_photo(source: Source) -> bool:
    return isinstance(source, Path) and source.suffix.lower() in (".jpg", ".jpeg")


def _read(path: Path) -> QImage:
    try:
        if not path.is_file() and path.exists():  # a pipe would keep us waiting
            raise NotAPictureError(translate("Pictures", "{0} is not a file.").format(path.name))
        nbytes = path.stat().st_size
        data = read_untrusted(path, MOST_FILE_BYTES) if nbytes <= MOST_FILE_BYTES else b""
    except OSError as error:
        raise NotAPictureError(
            translate("Pictures", "{0} cannot be read ({1}).").format(path.name, reason(error))
        ) from None
    if nbytes > MOST_FILE_BYTES:
        words = translate("Pictures", "{0} is larger than {1}: make it smaller first.")
        raise NotAPictureError(words.format(path.name, about(MOST_FILE_BYTES)))
    if is_endless(data):
        raise NotAPictureError(translate("Pictures", "{0} is damaged and cannot be shown.").format(path.name))
    content = QByteArray(data)  # the buffer does not keep it
    buffer = QBuffer(content)
    reader = QImageReader(buffer)
    reader.setDecideFormatFromContent(True)
    if bytes(reader.format().data()).decode("ascii", "replace") not in _FORMATS:
        kind = (
            ""
            if media_of(data)
            else kind_of(data) or (path.suffix[1:].upper() if path.suffix.lower() in OTHER_SUFFIXES else "")
        )
        if kind:
            words = translate("Pictures", "{0} is in the {1} format, which is not read here: save it as PNG or JPEG.")
            raise NotAPictureError(words.format(path.name, kind))
        words = translate("Pictures", "{0} is not a PNG, JPEG, WebP or GIF picture.")
        raise NotAPictureError(words.format(path.name))
    size, is_jpeg = reader.size(), bytes(reader.format().data()) == b"jpeg"
    if size.width() * size.height() > MOST_PIXELS * (_JPEG_TIMES if is_jpeg else 1):
        raise NotAPictureError(
            translate("Pictures", "{0} has too many pixels: make it smaller first.").format(path.name)
        )
    if size.isValid():
        reader.setScaledSize(fitting(size, _MOST))  # while it is read: a photo of a camera takes little memory
    image = reader.read()
    if image.isNull():
        is_large = size.width() * size.height() * 4 > QImageReader.allocationLimit() * 2**20 > 0
        words = (
            translate("Pictures", "{0} has too many pixels: make it smaller first.")
            if is_large
            else translate("Pictures", "{0} is damaged and cannot be shown.")
        )
        raise NotAPictureError(words.format(path.name))
    if (turn := _TURNS.get(orientation_of(data))) is not None:
        image = image.transformed(QTransform().rotate(turn[1]).scale(-1 if turn[0] else 1, 1))
    return image


def _encoded(image: QImage, is_photo: bool) -> Picture:
    fit = fitting(image.size(), _MOST)
    if fit != image.size():
        image = image.scaled(fit, Qt.AspectRatioMode.IgnoreAspectRatio, Qt.TransformationMode.SmoothTransformation)
    plain = image.convertToFormat(
        QImage.Format.Format_ARGB32 if image.hasAlphaChannel() else QImage.Format.Format_RGB32
    )
    for name in plain.textKeys():
        plain.setText(name, "")  # a PNG keeps what programs wrote into it
    if not is_photo:
        data = _written(plain, "PNG", -1)
        if len(data) <= MOST_PNG_BYTES:
            return Picture("image/png", base64.b64encode(data).decode("ascii"))
    return Picture("image/jpeg", base64.b64encode(_written(_on_white(plain), "JPEG", JPEG_QUALITY)).decode("ascii"))


def _on_white(image: QImage) -> QImage:
    if not image.hasAlphaChannel():
        return image
    page = QImage(image.size(), QImage.Format.Format_RGB32)
    page.fill(QColor("white"))
    painter = QPainter(page)
    painter.drawImage(0, 0, image)
    painter.end()
    return page


def _written(image: QImage, kind: str, quality: int) -> bytes:
    buffer = QBuffer()
    buffer.open(QBuffer.OpenModeFlag.WriteOnly)
    image.save(buffer, kind, quality)  # type: ignore[call-overload]
    return bytes(buffer.data().data())


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
