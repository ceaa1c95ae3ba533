"""Documents that tests write themselves: pdf (also encrypted, or pictures alone), docx and zip bombs."""

import hashlib
import zipfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

_PAD = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")


def pdf(
    pages: Sequence[str], *, titles: Sequence[tuple[str, int]] = (), password: str = "", owner: str | None = None
) -> bytes:
    """A pdf with a page for each text, and an outline of titles and their pages from 0; without text, a page is blank.

    Args:
        password: to open it, by RC4 with 40 bits, the oldest way.
        owner: encrypts it, too, but it opens without a password if `password` is empty.
    """
    count = len(pages)
    first = 4 + 2 * count
    outline = f"/Outlines {first} 0 R" if titles else ""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(count))
    objects: dict[int, bytes] = {
        1: f"<< /Type /Catalog /Pages 2 0 R {outline} >>".encode(),
        2: f"<< /Type /Pages /Kids [{kids}] /Count {count} >>".encode(),
        3: b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    }
    key = b""
    if password or owner is not None:
        key, encryption = _encryption(password, owner or password)
    for at, text in enumerate(pages):
        lines = b"".join(b"(%s) Tj T* " % _shown(line) for line in text.split("\n")) if text else b""
        content = b"BT /F1 9 Tf 30 800 Td 11 TL " + lines + b"ET" if text else b""
        if key:
            content = _rc4(_object_key(key, 5 + 2 * at), content)
        objects[4 + 2 * at] = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 842] /Contents {5 + 2 * at} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        ).encode()
        objects[5 + 2 * at] = b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content)
    if titles:
        last = first + len(titles)
        objects[first] = f"<< /Type /Outlines /First {first + 1} 0 R /Last {last} 0 R /Count {len(titles)} >>".encode()
        for at, (title, page) in enumerate(titles, start=first + 1):
            following = f"/Next {at + 1} 0 R" if at < last else ""
            before = f"/Prev {at - 1} 0 R" if at > first + 1 else ""
            objects[at] = (
                b"<< /Title (%s) " % _shown(title)
                + f"/Parent {first} 0 R {following} {before} /Dest [{4 + 2 * page} 0 R /Fit] >>".encode()
            )
    trailer = b"/Root 1 0 R"
    if key:
        objects[max(objects) + 1] = encryption
        trailer += b" /Encrypt %d 0 R /ID [<00> <00>]" % max(objects)
    out, places = bytearray(b"%PDF-1.4\n"), {}
    for number, body in sorted(objects.items()):
        places[number] = len(out)
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % places[number] for number in sorted(objects))
    out += b"trailer << /Size %d %s >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, trailer, start)
    return bytes(out)


def _shown(line: str) -> bytes:
    return line.encode("cp1252", "replace").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)")


def _encryption(password: str, owner: str) -> tuple[bytes, bytes]:
    """The key, and the dictionary that tells how to find it (PDF 1.4, 3.5.2, revision 2)."""
    padded, master = ((each.encode() + _PAD)[:32] for each in (password, owner))
    owned = _rc4(hashlib.md5(master).digest()[:5], padded)
    key = hashlib.md5(padded + owned + b"\xff\xff\xff\xff" + b"\x00").digest()[:5]
    user = _rc4(key, _PAD)
    entries = f"/O <{owned.hex()}> /U <{user.hex()}>"
    return key, f"<< /Filter /Standard /V 1 /R 2 {entries} /P -1 >>".encode()


def _object_key(key: bytes, number: int) -> bytes:
    return hashlib.md5(key + number.to_bytes(3, "little") + b"\x00\x00").digest()[:10]


def _rc4(key: bytes, data: bytes) -> bytes:
    box, at = list(range(256)), 0
    for place in range(256):
        at = (at + box[place] + key[place % len(key)]) % 256
        box[place], box[at] = box[at], box[place]
    out, one, two = bytearray(), 0, 0
    for byte in data:
        one = (one + 1) % 256
        two = (two + box[one]) % 256
        box[one], box[two] = box[two], box[one]
        out.append(byte ^ box[(box[one] + box[two]) % 256])
    return bytes(out)


def docx(path: Path, paragraphs: Sequence[str]) -> Path:
    """A docx of these paragraphs; one that begins with `# ` is a heading."""
    body = ""
    for text in paragraphs:
        style = '<w:pPr><w:pStyle w:val="Heading1"/></w:pPr>' if text.startswith("# ") else ""
        body += f'<w:p>{style}<w:r><w:t xml:space="preserve">{escape(text.removeprefix("# "))}</w:t></w:r></w:p>'
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    heading = '<w:style w:type="paragraph" w:styleId="Heading1"><w:name w:val="heading 1"/></w:style>'
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    relations = "http://schemas.openxmlformats.org/package/2006/relationships"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "[Content_Types].xml",
            '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
            '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            f'<Override PartName="/word/document.xml" ContentType="{kind}.document.main+xml"/>'
            f'<Override PartName="/word/styles.xml" ContentType="{kind}.styles+xml"/></Types>',
        )
        archive.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{relations}"><Relationship Id="r1" Type="{office}/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
        )
        archive.writestr(
            "word/_rels/document.xml.rels",
            f'<Relationships xmlns="{relations}"><Relationship Id="r1" Type="{office}/styles" Target="styles.xml"/>'
            "</Relationships>",
        )
        archive.writestr("word/styles.xml", f"<w:styles {space}>{heading}</w:styles>")
        archive.writestr("word/document.xml", f"<w:document {space}><w:body>{body}</w:body></w:document>")
    return path


def bomb(path: Path, *, lies: bool = False) -> Path:
    """A docx of 300 MB of blanks; one that `lies` says that they are a few."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("word/document.xml", "w", force_zip64=True) as part,
    ):
        for _ in range(300):
            part.write(b" " * 10**6)
    if lies:
        real = (300 * 10**6).to_bytes(4, "little")
        path.write_bytes(path.read_bytes().replace(real, (1000).to_bytes(4, "little")))
    return path
