"""Pictures that strangers send or files hold: checked by their own headers, and read as RGB.

A picture may be a bomb: a few kilobytes that unpack into gigabytes, a thousand scans over one photo, or millions of
remarks. So a file's parts are walked here first. What is no pixel is dropped, a size beyond `MOST_PIXELS` is refused
before anything is unpacked, and Pillow is given what is left. It is imported by the one function that needs it.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.common.chat import ChatMessage, Picture
from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import about
from engine.common.untrusted import parse_json, read_untrusted, reason

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PICTURES = 8
"""In one message."""
MOST_PICTURE_BYTES = 16 * 10**6
MOST_ALL_BYTES = 24 * 10**6
"""Of the pictures of one request, which goes to the engine's process as one line."""
MOST_PIXELS = 50_000_000
"""A photo of a good telephone; in RGB it takes 200 MB while it is read."""
LONGEST_STRIP = 200
"""How many times as wide as high (or the other way) a picture may be: the makers' own code takes no longer ones."""
_MOST_SCANS = 256
_MOST_BLOCKS = 200_000
"""Of a file's parts: more than any picture of this many bytes needs, and soon walked."""
_MOST_EXIF_BYTES = 2**16
_DATA_ADDRESS = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)
_READ = "PNG, JPEG, WebP or GIF"

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"8BPS", "Photoshop"),
    (b"%PDF", "PDF"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
)
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys(
    (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"
)
_READABLE = ("PNG", "JPEG", "WebP", "GIF")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
"""Of files that may be read."""


class _DamagedError(Exception):
    """What a file says of itself cannot be; the argument completes a sentence."""


class _EndlessError(_DamagedError):
    """It has so many parts that a reader would take for ever."""


@dataclass(frozen=True, slots=True)
class _Walked:
    """A picture's size before it is turned, its file without what is no pixel, and what a camera wrote into it."""

    width: int
    height: int
    file: bytes
    exif: bytes = b""


def kind_of(data: bytes) -> str:
    """The kind of picture that a file's first bytes say, such as `PNG`, also one that is not read; empty for none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp":
        brands = (data[8:12], *(data[at : at + 4] for at in range(16, min(64, int.from_bytes(data[:4], "big")), 4)))
        return next((_BRANDS[brand] for brand in brands if brand in _BRANDS), "")
    if re.match(rb"(\xef\xbb\xbf)?\s*<(\?xml|!--|!DOCTYPE svg|svg)", data) and b"<svg" in data[:4096]:
        return "SVG"
    return next((kind for begins, kind in _SIGNATURES if data.startswith(begins)), "")


def media_of(data: bytes) -> str:
    """The type of a picture's file by its first bytes, such as `image/png`; empty if it is none that is read here."""
    kind = kind_of(data)
    return f"image/{kind.lower()}" if kind in _READABLE else ""


def is_endless(data: bytes) -> bool:
    """Whether a picture's file has so many parts that readers of other libraries would take for ever."""
    walk = _WALKS.get(kind_of(data))
    try:
        if walk is not None:
            walk(data)
    except _EndlessError:
        return True
    except (_DamagedError, IndexError, ValueError):
        pass
    return False


def orientation_of(data: bytes) -> int:
    """How EXIF says that a picture's file is turned, 1 to 8; 1 if it does not say."""
    try:
        return _turn(_WALKS[kind_of(data)](data).exif)
    except (_DamagedError, LookupError, ValueError):
        return 1


def picture_of(data: bytes, where: str) -> Picture:
    """The picture that a file's bytes are; only its headers are looked at.

    Args:
        where: what begins a sentence about it, such as a file's name.
    """
    _checked(data, where)
    return Picture(media_of(data), base64.b64encode(data).decode("ascii"))


def picture_at(address: str, where: str) -> Picture:
    found = _DATA_ADDRESS.match(address)
    if found is None:
        scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]{0,20}:", address)
        what = f"is an address ({scheme[0]}//…), and nothing is fetched here" if scheme else "is no data: address"
        raise _wrong(f"{where} {what}: send the picture itself, as data:image/png;base64,…")
    if "base64" not in found[2].lower().split(";"):
        raise _wrong(f"{where} is a data: address without base64: send it as data:image/png;base64,…")
    return picture_in_base64(address[found.end() :], where)


def picture_in_base64(text: str, where: str) -> Picture:
    """The picture whose file is given in base64."""
    if len(text) > MOST_PICTURE_BYTES * 3 // 2:
        raise _too_many_bytes(where)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise _wrong(f"{where} is not valid base64: send the picture's file in base64, whole.") from None
    return picture_of(data, where)


def picture_in_file(path: Path, where: str = "") -> Picture:
    where = where or f"The picture {path}"
    try:
        data = read_untrusted(path, MOST_PICTURE_BYTES)
    except OSError as error:
        raise _wrong(f"{where} cannot be read ({reason(error)}): check its name.") from None
    return picture_of(data, where)


def local_path(address: str, folder: Path, where: str) -> Path:
    """The path that a `file:` address means, or a path that may be relative to a folder."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(?!\\)", address) is None:
        return folder / Path(address).expanduser()
    found = urlsplit(address)
    if found.scheme.lower() != "file" or found.netloc.lower() not in ("", "localhost"):
        begins = f"{found.scheme}://{found.netloc}"
        raise _wrong(
            f"{where} lies on another machine ({begins[:80]}), and nothing is fetched here: save it as a file."
        )
    from urllib.request import url2pathname

    return Path(url2pathname(found.path))


def pictures_in_files(paths: Sequence[Path]) -> tuple[Picture, ...]:
    if len(paths) > MOST_PICTURES:
        raise _wrong(f"{len(paths)} pictures are too many for one message: give up to {MOST_PICTURES}.")
    found = tuple(map(picture_in_file, paths))
    nbytes = sum(len(each.data) for each in found) * 3 // 4
    if nbytes > MOST_ALL_BYTES:
        raise _wrong(f"The pictures have {about(nbytes)}, and one message takes {about(MOST_ALL_BYTES)}: send fewer.")
    return found


def pictures_of(message: ChatMessage) -> tuple[Picture, ...]:
    if not message.parts:
        return ()
    parts = parse_json(message.parts)
    found = [part["image_url"]["url"] for part in parts if isinstance(part, dict) and part.get("type") == "image_url"]
    return tuple(picture_at(str(url), named(number, len(found))) for number, url in enumerate(found, 1))


def named(number: int, count: int) -> str:
    """What begins a sentence about one of some pictures that have no names."""
    return f"Picture {number}" if count > 1 else "The picture"


def size_of(picture: Picture) -> tuple[int, int]:
    """Width and height in pixels as people see it: turned as the camera says.  By headers alone."""
    walked = _checked(base64.b64decode(picture.data), "The picture")
    turned = _turn(walked.exif) >= 5
    return (walked.height, walked.width) if turned else (walked.width, walked.height)


def read_picture(picture: Picture, where: str) -> Image:
    """The picture as RGB: the first of an animation, turned as the camera says, what is transparent over white.

    Args:
        where: what begins a sentence about it.
    """
    import PIL.Image

    try:
        data = base64.b64decode(picture.data, validate=True)
    except (binascii.Error, ValueError):
        raise _wrong(f"{where} is not valid base64: send the picture's file in base64, whole.") from None
    walked = _checked(data, where)
    try:
        with PIL.Image.open(io.BytesIO(walked.file), formats=[kind_of(data).upper()]) as opened:
            opened.load()
            image = _rgb(opened)
        turn = _turn(walked.exif)
        return image.transpose(PIL.Image.Transpose(_TURNS[turn])) if turn in _TURNS else image
    except Exception as error:  # a library's readers of strangers' files fail in every way there is
        if isinstance(error, MemoryError):
            raise _wrong(f"{where} needs more memory than is free: make it smaller.") from None
        raise _wrong(f"{where} is damaged: open it in another program and save it anew.") from None


_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Pillow's transpositions by what EXIF calls the orientation."""


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode.startswith("I;16"):
        return image.point(lambda value: value * (1 / 256), "L").convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image.copy()
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        page = PIL.Image.new("RGB", layered.size, "white")
        page.paste(layered, mask=layered.getchannel("A"))
        return page
    return image.convert("RGB")


def _checked(data: bytes, where: str) -> _Walked:
    kind = kind_of(data)
    if kind not in _READABLE:
        if kind:
            raise _wrong(f"{where} is in the {kind} format, which is not read here: save it as PNG or JPEG.")
        raise _wrong(f"{where} is no picture that is read here: give a {_READ} file.")
    if len(data) > MOST_PICTURE_BYTES:
        raise _too_many_bytes(where)
    try:
        walked = _WALKS[kind](data)
    except _DamagedError as error:
        raise _wrong(f"{where} is damaged ({error}): open it in another program and save it anew.") from None
    except (IndexError, ValueError):
        raise _wrong(f"{where} is cut off: copy or save it anew.") from None
    wide, high = walked.width, walked.height
    if not wide or not high:
        raise _wrong(f"{where} has no pixels: give another.")
    if wide * high > MOST_PIXELS:
        words = f"has {wide:,} × {high:,} pixels, and at most {MOST_PIXELS // 10**6} million are read"
        raise _wrong(f"{where} {words}: make it smaller.")
    if max(wide, high) > LONGEST_STRIP * min(wide, high):
        raise _wrong(f"{where} has {wide:,} × {high:,} pixels, too narrow for a model to read: cut it into pieces.")
    return walked


def _png(data: bytes) -> _Walked:
    """The chunks that make pixels, those of the first picture alone, with its data in one."""
    at, kept, pixels, exif, ended, blocks = 8, [data[:8]], list[bytes](), b"", False, 0
    while not ended:
        nbytes, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 12 + nbytes
        if end > len(data) or len(kind) < 4:
            raise IndexError
        _count(blocks := blocks + 1)
        if kind == b"IDAT":
            pixels.append(data[at + 8 : end - 4])
        elif kind in (b"IHDR", b"PLTE", b"tRNS"):
            kept.append(data[at:end])
        elif kind == b"eXIf" and nbytes <= _MOST_EXIF_BYTES:
            exif = data[at + 8 : end - 4]
        at, ended = end, kind == b"IEND"
    if len(kept) < 2 or kept[1][4:8] != b"IHDR" or len(kept) > 4 or len(kept[1]) != 25:
        raise _DamagedError("its chunks are not those of a PNG")
    joined = b"IDAT" + b"".join(pixels)
    kept += [(len(joined) - 4).to_bytes(4, "big"), joined, zlib.crc32(joined).to_bytes(4, "big")]
    kept.append(b"\0\0\0\0IEND\xaeB`\x82")
    head = kept[1]
    return _Walked(int.from_bytes(head[8:12], "big"), int.from_bytes(head[12:16], "big"), b"".join(kept), exif)


def _jpeg(data: bytes) -> _Walked:
    """The segments up to the first scan that make pixels, and all scans up to the end of this picture."""
    at, kept, exif, sizes, apps, blocks = 2, [data[:2]], b"", list[tuple[int, int]](), set[int](), 0
    while True:
        _count(blocks := blocks + 1)
        if data[at : at + 2] == b"\xff\xff":  # filling
            at += 1
            continue
        marker, nbytes = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at] != 0xFF or nbytes < 2:
            raise _DamagedError("its segments are not those of a JPEG")
        if marker == 0xDA:
            break
        end = at + 2 + nbytes
        if end > len(data):
            raise IndexError
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            sizes.append((int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")))
        if marker == 0xE1 and not exif and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = data[at + 10 : end]
        is_app = marker in (0xE0, 0xEE) and marker not in apps  # how its colours are meant
        if 0xC0 <= marker <= 0xCF or marker in (0xDB, 0xDD) or is_app:
            kept.append(data[at:end])
            apps.add(marker)
        at = end
    end = data.find(b"\xff\xd9", at)
    if end < 0:
        raise IndexError
    if data.count(b"\xff\xda", at, end) > _MOST_SCANS:
        raise _EndlessError("it has far too many scans")
    if len(sizes) != 1:
        raise _DamagedError("its parts are not those of a JPEG")
    kept.append(data[at : end + 2])
    return _Walked(*sizes[0], b"".join(kept), exif)


def _gif(data: bytes) -> _Walked:
    wide, high = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    at = 13 + _colours(data[10])
    kept = [data[:at]]
    extensions = 0
    while data[at] == 0x21:
        _count(extensions := extensions + 1)
        end = _after_blocks(data, at + 2)
        if data[at + 1] == 0xF9:
            kept[1:] = [data[at:end]]
        at = end
    if data[at] != 0x2C:
        raise _DamagedError("it has no picture")
    left, top, own_wide, own_high = (int.from_bytes(data[at + k : at + k + 2], "little") for k in (1, 3, 5, 7))
    end = _after_blocks(data, at + 11 + _colours(data[at + 9]))
    kept += [data[at:end], b";"]
    return _Walked(max(wide, left + own_wide), max(high, top + own_high), b"".join(kept))


def _colours(flags: int) -> int:
    """Bytes of a GIF's table of colours."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _after_blocks(data: bytes, at: int) -> int:
    blocks = 0
    while data[at]:
        at += 1 + data[at]
        _count(blocks := blocks + 1)
    return at + 1


def _count(blocks: int) -> None:
    if blocks > _MOST_BLOCKS:
        raise _EndlessError("it has far too many parts")


def _webp(data: bytes) -> _Walked:
    end, at, exif, sizes = 8 + int.from_bytes(data[4:8], "little"), 12, b"", list[tuple[int, int]]()
    blocks = 0
    if end > len(data):
        raise IndexError
    while at + 8 <= end:
        _count(blocks := blocks + 1)
        kind, nbytes, body = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little"), at + 8
        if kind == b"VP8X":
            sizes.append(tuple(1 + int.from_bytes(data[body + k : body + k + 3], "little") for k in (4, 7)))  # type: ignore[arg-type]
        elif kind == b"VP8L":
            bits = int.from_bytes(data[body + 1 : body + 5], "little")
            sizes.append((1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
        elif kind == b"VP8 ":
            sizes.append(tuple(int.from_bytes(data[body + k : body + k + 2], "little") & 0x3FFF for k in (6, 8)))  # type: ignore[arg-type]
        elif kind == b"EXIF" and nbytes <= _MOST_EXIF_BYTES:
            exif = data[body : body + nbytes]
        at = body + nbytes + nbytes % 2
    if not sizes:
        raise _DamagedError("it has no picture")
    return _Walked(*sizes[0], data, exif.removeprefix(b"Exif\0\0"))


_WALKS: dict[str, Callable[[bytes], _Walked]] = {"PNG": _png, "JPEG": _jpeg, "GIF": _gif, "WebP": _webp}


def _turn(exif: bytes) -> int:
    """The orientation that a camera wrote; 1 if it wrote none."""
    order: Any = {b"II*\0": "little", b"MM\0*": "big"}.get(exif[:4])
    if order is None:
        return 1
    at = int.from_bytes(exif[4:8], order)
    for entry in range(at + 2, at + 2 + 12 * int.from_bytes(exif[at : at + 2], order), 12):
        if int.from_bytes(exif[entry : entry + 2], order) == 0x0112:
            return int.from_bytes(exif[entry + 8 : entry + 10], order)
    return 1


def _too_many_bytes(where: str) -> EngineError:
    return _wrong(f"{where} is larger than {about(MOST_PICTURE_BYTES)}: make it smaller.")


def _wrong(message: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, message)
