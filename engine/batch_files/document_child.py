"""The child process that reads documents: `python -m engine.batch_files.document_child`, see `engine.common.confined`.

    {"path": P, "seconds": S}

Before the answer come `["part", page, heading, text]` for each part of the document and `["share", S]` now and then.
The answer is {"pages": N, "remark": R}, or {"problem": why} completing a sentence about the file.

A PDF is read by native code, a docx by a library that builds all of it in memory, and any of them may be made to crash
its reader or to fill the memory: here that costs this process alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, BinaryIO

from engine.batch_files.documents import (
    MEMORY_BYTES,
    MOST_CHARACTERS,
    MOST_PAGES,
    UNREADABLE,
    Part,
    WhatWasRead,
    kind_of,
)
from engine.common.confined import dies_after, limit_memory
from engine.common.errors import EngineError
from engine.common.falls import passed_over
from engine.common.sizes import about
from engine.common.untrusted import check_untrusted, open_untrusted, parse_json, reason

_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MOST_INFLATED_BYTES = 256 * 10**6
_AT_ONCE = 1 << 20
_PASSWORD_ERROR = 4  # FPDF_ERR_PASSWORD


class _NotReadError(Exception):
    """The argument completes a sentence about the file."""


Parts = Iterator[Part | float]
"""Of a document, with the share that has been read now and then; a `WhatWasRead` is what it returns."""


def _pdf(path: Path, known: WhatWasRead) -> Parts:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) == _PASSWORD_ERROR:
            raise _NotReadError("is protected by a password; save it without one") from None
        raise _NotReadError("is damaged, or no pdf") from None
    known.pages = len(document)
    if known.pages > MOST_PAGES:
        raise _NotReadError(f"has {known.pages:,} pages, more than {MOST_PAGES:,}")
    titles, heading = _titles(document), ""
    for number in range(known.pages):
        heading = titles.get(number, heading)
        try:
            page = document[number]
        except pypdfium2.PdfiumError:
            continue  # one damaged page costs itself
        text_page = page.get_textpage()
        text = _plain(text_page.get_text_range())
        text_page.close()
        page.close()
        if text.strip():
            yield Part(text.strip("\n"), number + 1, heading)
        yield (number + 1) / known.pages


def _titles(document: Any) -> dict[int, str]:
    """By page, from 0: the last heading of the outline that begins there."""
    found: dict[int, str] = {}
    with passed_over("An outline was not read"):  # it may be damaged, which costs nothing else
        for mark in document.get_toc(max_depth=4):
            place = mark.get_dest()
            index = place.get_index() if place is not None else None
            if index is not None:
                found[index] = " ".join(mark.get_title().split())[:200]
    return found


_HYPHEN = re.compile("[\x02\ufffe][ \t]*\n?")


def _plain(text: str) -> str:
    """The text of a page: a word that is divided at the end of a line is one again."""
    return _HYPHEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def _docx(path: Path, _known: WhatWasRead) -> Parts:
    with open_untrusted(path) as file:
        if file.read(8) == _OLE:
            raise _NotReadError("is protected by a password or is an old .doc; save it as .docx without a password")
        file.seek(0)
        _refuse_bomb(file, path.stat().st_size)
        file.seek(0)
        yield 0.1
        import mammoth

        content = io.BytesIO(file.read())  # without a name, beside which it would look for other files
    html = mammoth.convert_to_html(content, convert_image=mammoth.images.img_element(lambda _image: {})).value
    yield 0.7
    yield from _html_parts(html)


def _refuse_bomb(file: BinaryIO, packed: int) -> None:
    """Unless what is in it, as its list says and as it turns out, is no more than a document may have."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = {entry.filename for entry in entries}
            inflated = sum(entry.file_size for entry in entries)
            if inflated <= _MOST_INFLATED_BYTES:
                inflated = 0
                for entry in entries:
                    with archive.open(entry) as part:
                        while inflated <= _MOST_INFLATED_BYTES and (piece := part.read(_AT_ONCE)):
                            inflated += len(piece)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise _NotReadError("is damaged, or no docx") from error
    if inflated > _MOST_INFLATED_BYTES:
        raise _NotReadError(
            f"unpacks to more than {about(_MOST_INFLATED_BYTES)} from {about(packed)}, which may be a zip bomb; "
            "save it as pdf if you trust it"
        )
    if "word/document.xml" not in names:
        raise _NotReadError("is no docx")


def _html(path: Path, _known: WhatWasRead) -> Parts:
    with open_untrusted(path) as file:
        content = file.read(4 * MOST_CHARACTERS + 1)
    named = re.search(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w.:-]{1,40})", content[:4096], re.IGNORECASE)
    yield from _html_parts(_decoded(content, named[1].decode("ascii", "replace") if named else ""))


def _html_parts(html: str) -> Iterator[Part]:
    parser = _PageText()
    parser.feed(html)
    parser.close()
    yield from parser.parts()


_BLOCK_TAGS = (
    "address article aside blockquote dd details dialog div dl dt fieldset figcaption figure footer form header hr "
    "legend main nav ol p pre section summary table tbody tfoot thead ul caption body"
)


class _PageText(HTMLParser):
    """The text of a page as it is shown, divided at its headings."""

    _UNSHOWN = frozenset(("script", "style", "template", "noscript", "svg", "head", "iframe", "object"))
    _BLOCKS = frozenset(_BLOCK_TAGS.split())
    _HEADINGS = frozenset(("h1", "h2", "h3", "h4", "h5", "h6"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._found: list[Part] = []
        self._path: list[tuple[int, str]] = []
        self._heading: list[str] | None = None
        self._unshown: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, _attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._UNSHOWN:
            self._unshown.append(tag)
        elif tag in self._HEADINGS:
            self._end_part()
            self._heading = []
        elif tag == "br":
            self._pieces.append("\n")
        elif tag == "li":
            self._pieces.append("\n- ")
        elif tag == "tr":
            self._pieces.append("\n")
        elif tag in ("td", "th"):
            self._pieces.append(" | " if self._pieces and not self._pieces[-1].endswith("\n") else "")
        elif tag in self._BLOCKS:
            self._pieces.append("\n\n")
            self._pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in self._UNSHOWN and tag in self._unshown:
            while self._unshown.pop() != tag:
                pass
        elif tag == "body":
            self._unshown.clear()
        elif tag in self._HEADINGS and self._heading is not None:
            title = " ".join("".join(self._heading).split())[:200]
            self._heading = None
            if title:
                level = int(tag[1])
                self._path = [*((at, name) for at, name in self._path if at < level), (level, title)]
                self._pieces.append(f"{title}\n\n")
        elif tag in self._BLOCKS:
            self._pieces.append("\n\n")
            self._pre -= tag == "pre" and self._pre > 0

    def handle_data(self, data: str) -> None:
        if self._unshown:
            return
        if self._heading is not None:
            self._heading.append(data)
        elif self._pre:
            self._pieces.append(data)
        else:
            words = re.sub(r"\s+", " ", data)
            starts_line = not self._pieces or self._pieces[-1].endswith(("\n", " "))
            self._pieces.append(words.lstrip() if starts_line else words)

    def parts(self) -> list[Part]:
        self._end_part()
        return self._found

    def _end_part(self) -> None:
        if self._heading:  # one that was never closed
            self._pieces.append("".join(self._heading))
        text = re.sub(r"[ \t]+\n", "\n", "".join(self._pieces))
        text = re.sub(r"\n{3,}", "\n\n", text).strip("\n")
        self._pieces = []
        if text.strip():
            self._found.append(Part(text, 0, _path_of(self._path)))


def _path_of(levels: list[tuple[int, str]]) -> str:
    return " › ".join(name for _level, name in levels)


def _markdown(path: Path, _known: WhatWasRead) -> Parts:
    text = _text_in(path)
    levels: list[tuple[int, str]] = []
    lines: list[str] = []
    fence = ""
    for line in text.split("\n"):
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1][:3]
        elif mark and mark[1].startswith(fence):
            fence = ""
        title = re.match(r" {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$", line) if not fence else None
        if title and title[2]:
            if any(map(str.strip, lines)):
                yield Part("\n".join(lines).strip("\n"), 0, _path_of(levels))
            lines = []
            levels = [*((at, name) for at, name in levels if at < len(title[1])), (len(title[1]), title[2][:200])]
        lines.append(line)
    if any(map(str.strip, lines)):
        yield Part("\n".join(lines).strip("\n"), 0, _path_of(levels))


def _text(path: Path, _known: WhatWasRead) -> Parts:
    yield Part(_text_in(path).strip("\n"))


def _json(path: Path, _known: WhatWasRead) -> Parts:
    text = _text_in(path)
    if max(map(len, text.split("\n")), default=0) > 2000:  # all in one line, where nobody finds anything
        with contextlib.suppress(ValueError):
            text = json.dumps(parse_json(text, deepest=100), ensure_ascii=False, indent=1)
    yield Part(text.strip("\n"))


def _text_in(path: Path) -> str:
    with open_untrusted(path) as file:
        content = file.read(4 * MOST_CHARACTERS + 1)
    return _decoded(content).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(content: bytes, named: str = "") -> str:
    """By its mark, as UTF-8 or UTF-16, by the name of an encoding, or else as Windows writes Western text."""
    from engine.batch_files.rows import marked_encoding

    sure = marked_encoding(content[:4096])
    for encoding in filter(None, (sure, named, "cp1252")):
        with contextlib.suppress(UnicodeDecodeError, LookupError):
            text = content.decode(encoding)
            odd = sum(text.count(chr(code)) for code in (*range(9), *range(14, 27), 28, 29, 30, 31, 127))
            if odd * 200 > len(text):
                break
            return text
    raise _NotReadError(UNREADABLE)


def _table(path: Path, known: WhatWasRead) -> Parts:
    from engine.batch_files.opening import rows_of
    from engine.batch_files.prompts import as_text

    source = rows_of(path)
    heading = " | ".join(source.columns)
    lines = [heading]
    for row in source.rows():
        if row.problem:
            known.remark = known.remark or f"Row {row.index + 1:,} {row.problem}."
        if row.fields:
            lines.append(" | ".join(" ".join(as_text(value).split()) for value in row.fields.values()))
        if row.index % 1000 == 999:
            yield row.share
    known.remark = " ".join(filter(None, (known.remark, source.remark)))
    yield Part("\n".join(lines), 0, heading[:200])


def _sheets(path: Path, _known: WhatWasRead) -> Parts:
    from engine.batch_files.prompts import as_text
    from engine.batch_files.tables import SpreadsheetRows

    for name, cells in SpreadsheetRows(path).sheets():
        lines = [" | ".join(" ".join(as_text(value).split()) for value in line) for line in cells]
        if lines:
            yield Part("\n".join(lines), 0, name)


_READERS = {"pdf": _pdf, "docx": _docx, "html": _html, "md": _markdown, "json": _json, "table": _table, "xlsx": _sheets}


def _answer(path: Path, answers: BinaryIO) -> dict[str, Any]:
    known, characters = WhatWasRead(), 0
    try:
        check_untrusted(path, sys.maxsize)
        for part in _READERS.get(kind_of(path), _text)(path, known):
            line: list[Any] = ["share", part]
            if isinstance(part, Part):
                text = part.text.replace("\x00", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                characters += len(text)
                if characters > MOST_CHARACTERS:
                    raise _NotReadError(f"has more than {MOST_CHARACTERS:,} characters")
                line = ["part", part.page, part.heading, text]
            answers.write(json.dumps(line).encode("ascii") + b"\n")
    except _NotReadError as error:
        return {"problem": str(error), "pages": known.pages}
    except EngineError as error:  # of a reader of rows: a sentence that begins with the path
        return {"problem": error.message.removeprefix(str(path)).strip().rstrip("."), "pages": 0}
    except OSError as error:
        return {"problem": f"cannot be read ({reason(error)})", "pages": 0}
    except MemoryError:
        return {"problem": "takes too much memory to read", "pages": 0}
    except Exception as error:  # anything that a damaged or hostile file makes a parser raise
        return {"problem": f"is damaged and cannot be read ({type(error).__name__})", "pages": 0}
    return {"pages": known.pages, "remark": known.remark}


def main() -> None:
    limit_memory(MEMORY_BYTES)
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        with dies_after(request["seconds"]):
            answer = _answer(Path(request["path"]), answers)
        answers.write(json.dumps(answer).encode("ascii") + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
