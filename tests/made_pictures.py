"""Pictures' files of every kind that is read."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image


def coloured(seed: int = 0, width: int = 30, height: int = 20) -> Image.Image:
    """A picture of soft colours, which lossy kinds keep."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A grey PNG of few bytes, whatever its size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def endless() -> bytes:
    """A JPEG with a scan that comes 5,000 times: each is quick to check, and all of them take for ever."""
    data = file_of(coloured(), "JPEG", progressive=True)
    at = data.index(b"\xff\xda")
    return data[:-2] + data[at : data.index(b"\xff", at + 12)] * 5000 + data[-2:]


def _see_through() -> Image.Image:
    image = coloured().convert("RGBA")
    image.putalpha(coloured(1).convert("L"))
    return image


def _turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    return file_of(coloured(), kind, exif=exif.tobytes())


def _grey16() -> Image.Image:
    return Image.fromarray(np.arange(0, 60_000, 100, dtype=np.uint16).reshape(20, 30))


def _moving() -> dict[str, Any]:
    return {"save_all": True, "append_images": [coloured(1), coloured(2)]}


MADE: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: file_of(coloured(), "PNG"),
    "PNG, grey": lambda: file_of(coloured().convert("L"), "PNG"),
    "PNG, two colours": lambda: file_of(coloured().convert("1"), "PNG"),
    "PNG, 16 bits": lambda: file_of(_grey16(), "PNG"),
    "PNG, palette": lambda: file_of(coloured().quantize(16), "PNG"),
    "PNG, see-through palette": lambda: file_of(_see_through().quantize(16), "PNG"),
    "PNG, see-through": lambda: file_of(_see_through(), "PNG"),
    "PNG, see-through grey": lambda: file_of(_see_through().convert("LA"), "PNG"),
    "PNG, moving": lambda: file_of(coloured(), "PNG", **_moving()),
    "PNG, turned": lambda: _turned("PNG", 6),
    "JPEG": lambda: file_of(coloured(), "JPEG"),
    "JPEG, grey": lambda: file_of(coloured().convert("L"), "JPEG"),
    "JPEG, progressive": lambda: file_of(coloured(), "JPEG", progressive=True),
    "JPEG, CMYK": lambda: file_of(coloured().convert("CMYK"), "JPEG"),
    **{f"JPEG, turned {way}": (lambda way=way: _turned("JPEG", way)) for way in range(1, 9)},  # type: ignore[misc]
    "GIF": lambda: file_of(coloured(), "GIF"),
    "GIF, moving": lambda: file_of(coloured(), "GIF", **_moving()),
    "GIF, see-through": lambda: file_of(_see_through(), "GIF"),
    "WebP": lambda: file_of(coloured(), "WEBP"),
    "WebP, lossless": lambda: file_of(coloured(), "WEBP", lossless=True),
    "WebP, see-through": lambda: file_of(_see_through(), "WEBP"),
    "WebP, moving": lambda: file_of(coloured(), "WEBP", **_moving()),
    "WebP, turned": lambda: _turned("WEBP", 8),
}
