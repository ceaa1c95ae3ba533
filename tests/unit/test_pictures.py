"""Pictures of strangers: every kind read as a plain library would, bombs and broken ones refused in a sentence."""

import base64
import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from engine.common.chat import ChatMessage, Picture, parts_with
from engine.common.errors import EngineError, ErrorCode
from engine.common.pictures import (
    MOST_PICTURE_BYTES,
    is_endless,
    kind_of,
    local_path,
    media_of,
    picture_at,
    picture_in_base64,
    picture_in_file,
    picture_of,
    pictures_of,
    read_picture,
    size_of,
)
from tests.made_pictures import MADE, coloured, endless, file_of, png_of

KINDS = ("PNG", "JPEG", "GIF", "WEBP")


def read(data: bytes) -> Image.Image:
    return read_picture(picture_of(data, "It"), "It")


def said(data: bytes) -> str:
    """What is said of a file that is refused."""
    with pytest.raises(EngineError) as failed:
        read(data)
    assert failed.value.code is ErrorCode.INVALID_REQUEST
    assert failed.value.message.startswith("It ")
    assert failed.value.message.endswith(".")
    assert "\n" not in failed.value.message
    return failed.value.message


def check(data: bytes) -> None:
    """It is read, or refused in a sentence."""
    try:
        mode = read(data).mode
    except EngineError:
        said(data)
    else:
        assert mode == "RGB"


@pytest.mark.parametrize("name", MADE)
def test_every_kind_is_read_as_a_plain_library_reads_it(name: str) -> None:
    data = MADE[name]()
    image = read(data)
    assert image.mode == "RGB"
    with Image.open(io.BytesIO(data)) as plain:
        turned = ImageOps.exif_transpose(plain)
        page = Image.new("RGB", turned.size, "white")
        page.paste(turned.convert("RGBA"), mask=turned.convert("RGBA").getchannel("A"))
    assert image.size == page.size == size_of(picture_of(data, "It"))
    wanted = np.asarray(page, dtype=int)
    if "16 bits" in name:
        wanted = np.asarray(turned, dtype=int)[..., None] >> 8
    assert np.abs(np.asarray(image, dtype=int) - wanted).max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_off_is_refused(kind: str) -> None:
    data = file_of(coloured(), kind)
    for length in range(0, len(data) - 1, max(1, len(data) // 60)):
        said(data[:length])


OTHERS = {
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "AVIF": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf",
    "SVG": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
    "TIFF": b"II*\0 and so on",
    "BMP": b"BM and so on",
    "PDF": b"%PDF-1.7",
    "JPEG XL": b"\xff\x0a and so on",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    assert said(OTHERS[kind]) == f"It is in the {kind} format, which is not read here: save it as PNG or JPEG."
    assert media_of(OTHERS[kind]) == ""


def test_what_is_no_picture_is_refused() -> None:
    for data in (b"", b"Hello", bytes(1000), b"RIFF\x10\0\0\0WAVEfmt "):
        assert "no picture" in said(data)
        assert kind_of(data) == ""


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _sized_jpeg(wide: int, high: int) -> bytes:
    data = bytearray(file_of(coloured(), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", high, wide)
    return bytes(data)


def _small_exif() -> bytes:
    data = file_of(coloured(), "JPEG")
    return data[:2] + b"\xff\xe1\x00\x09Exif\0\0x" * 150_000 + data[2:]


def _gif_remarks() -> bytes:
    data = file_of(coloured(), "GIF")
    at = 13 + (3 << (data[10] & 7) + 1)
    return data[:at] + b"\x21\xfe" + (b"\xff" + b"x" * 255) * 40_000 + b"\0" + data[at:]


HUGE = {
    "20,000 x 20,000": lambda: png_of(20_000, 20_000),
    "a JPEG of 65,000 x 65,000": lambda: _sized_jpeg(65_000, 65_000),
    "a GIF's first picture": lambda: b"GIF89a\x01\0\x01\0\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;",
    "a WebP of 16,384 x 16,384": lambda: b"RIFF\x16\0\0\0WEBPVP8X\n\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0",
    "a strip": lambda: png_of(40_000, 1),
}


@pytest.mark.parametrize("name", HUGE)
def test_nothing_is_unpacked_beyond_the_limit(name: str) -> None:
    data = HUGE[name]()
    tracemalloc.start()
    try:
        assert "pixels" in said(data)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_bombs_of_parts_are_dropped_or_refused() -> None:
    plain = file_of(coloured(), "PNG")
    zipped = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000), 1))
    colours = _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(50_000_000), 1))
    bombed = plain[:33] + zipped + colours + plain[33:]
    assert read(bombed).tobytes() == read(plain).tobytes()
    assert read(_gif_remarks()).tobytes() == read(file_of(coloured(), "GIF")).tobytes()
    assert read(_small_exif()).tobytes() == read(file_of(coloured(), "JPEG")).tobytes()
    assert "damaged" in said(endless())
    assert is_endless(endless())
    assert not any(map(is_endless, (bombed, plain, plain[:50], b"", OTHERS["HEIC"])))
    assert "far too many parts" in said(plain[:33] + _chunk(b"tEXt", b"") * 300_000 + plain[33:])
    assert "larger than 16 MB" in said(plain + bytes(MOST_PICTURE_BYTES))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mutated_files_are_read_or_refused_in_a_sentence(kind: str, data: st.DataObject) -> None:
    names = [name for name in MADE if name.upper().startswith(kind)]
    file = bytearray(MADE[data.draw(st.sampled_from(names))]())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(file) - 1))
        what = data.draw(st.sampled_from(("set", "cut", "insert", "repeat", "swap")))
        if what == "set":
            file[at] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del file[at : at + data.draw(st.integers(1, 40))]
        elif what == "insert":
            file[at:at] = data.draw(st.binary(min_size=1, max_size=12))
        elif what == "repeat":
            file[at:at] = file[at : at + 40] * data.draw(st.integers(1, 20))
        else:
            file[at : at + 4] = data.draw(st.sampled_from((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff")))
        if not file:
            break
    check(bytes(file))


@given(st.binary(max_size=400), st.sampled_from([b"", *(MADE[name]()[:60] for name in MADE)]))
def test_any_bytes_are_read_or_refused(data: bytes, head: bytes) -> None:
    check(head + data)


def test_addresses() -> None:
    data = file_of(coloured(), "PNG")
    picture = picture_of(data, "It")
    assert (picture.media, base64.b64decode(picture.data)) == ("image/png", data)
    assert picture_at(picture.url, "It") == picture
    # What an address says of its kind does not count, nor do breaks of lines.
    broken = "\n".join(picture.data[at : at + 76] for at in range(0, len(picture.data), 76))
    assert picture_at(f"data:text/plain;charset=x;BASE64,{broken}", "It") == picture
    for address, words in {
        "https://example.org/a.png": "nothing is fetched",
        "file:///etc/passwd": "nothing is fetched",
        "//example.org/a.png": "no data: address",
        "data:image/png,abc": "without base64",
        "data:image/png;base64,!!!!": "not valid base64",
        "data:image/png;base64,": "no picture",
        "": "no data: address",
    }.items():
        with pytest.raises(EngineError, match=words):
            picture_at(address, "It")
    with pytest.raises(EngineError, match="larger than"):
        picture_in_base64("A" * (2 * MOST_PICTURE_BYTES), "It")


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(file_of(coloured(), "PNG"))
    for address in ("a picture.png", str(file), file.as_uri(), f"file://localhost{file.as_uri()[7:]}"):
        assert picture_in_file(local_path(address, tmp_path, "It")).media == "image/png"
    for path in (tmp_path, tmp_path / "gone.png", tmp_path / "a\0b.png"):
        with pytest.raises(EngineError, match="cannot be read"):
            picture_in_file(path)
    for address in ("file://server/share/a.png", "https://example.org/a.png"):
        with pytest.raises(EngineError, match="another machine"):
            local_path(address, tmp_path, "It")


def test_pictures_of_a_turn() -> None:
    several = tuple(picture_of(file_of(coloured(seed), "PNG"), "It") for seed in (1, 2))
    assert pictures_of(ChatMessage("user", "?", parts=parts_with("?", several))) == several
    assert pictures_of(ChatMessage("user", "?")) == ()
    broken = Picture("image/png", base64.b64encode(b"\x89PNG\r\n\x1a\n").decode())
    with pytest.raises(EngineError, match=r"^Picture 2 is cut off"):
        pictures_of(ChatMessage("user", "?", parts=parts_with("?", (several[0], broken))))
