"""Documents are read as text in parts, apart; what cannot be read says why in words that complete a sentence."""

import os
import random
import zipfile
from pathlib import Path

import openpyxl
import pytest

from engine.batch_files.documents import DOCUMENTS, Document, DocumentReader, is_readable
from engine.batch_files.opening import open_source
from engine.common.errors import RequestCancelled
from tests.made_documents import bomb, docx, pdf


def read(path: Path, content: bytes | str = b"") -> Document:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return DOCUMENTS.read(path)


def test_a_pdf_has_pages_and_the_headings_of_its_outline(tmp_path: Path) -> None:
    shares: list[float] = []
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf(["Preface", "First\nlines", "Still first", "Last"], titles=[("One", 1), ("Two", 3)]))
    found = DOCUMENTS.read(path, on_share=shares.append)
    assert [(part.page, part.heading, part.text) for part in found.parts] == [
        (1, "", "Preface"),
        (2, "One", "First\nlines"),
        (3, "One", "Still first"),
        (4, "Two", "Last"),
    ]
    assert found.pages == 4
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_a_pdf_that_opens_without_a_password_is_read_and_another_says_so(tmp_path: Path) -> None:
    assert read(tmp_path / "a.pdf", pdf(["for all"], owner="me")).text == "for all"
    assert "password" in read(tmp_path / "a.pdf", pdf(["hidden"], password="secret")).problem


def test_a_scan_says_that_it_has_no_text(tmp_path: Path) -> None:
    found = read(tmp_path / "a.pdf", pdf(["", "", ""]))
    assert (found.pages, found.parts) == (3, ())
    assert "scan" in found.problem


def test_docx_and_html_are_divided_at_their_headings(tmp_path: Path) -> None:
    found = DOCUMENTS.read(docx(tmp_path / "a.docx", ["Before & after", "# Prices", "One <euro>", "Two"]))
    assert [(part.heading, part.text) for part in found.parts] == [
        ("", "Before & after"),
        ("Prices", "Prices\n\nOne <euro>\n\nTwo"),
    ]
    page = """<html><head><title>no</title><script>no()</script><style>no</style></head><body><h1>A &amp; B</h1>
        <p>Some <b>bold</b>   words.<ul><li>x<li>y</ul><table><tr><th>n<th>m<tr><td>1<td>2</table>
        <h2>Sub</h2><pre>  if x:\n    y</pre><h1>C</h1>end</body></html>"""
    found = read(tmp_path / "a.html", page)
    assert [part.heading for part in found.parts] == ["A & B", "A & B › Sub", "C"]
    assert found.parts[0].text == "A & B\n\nSome bold words.\n\n- x\n- y\n\nn | m\n1 | 2"
    assert "  if x:\n    y" in found.parts[1].text
    assert read(tmp_path / "b.html", '<meta charset="iso-8859-15"><p>5 \xa4'.encode("latin-1")).text == "5 €"


def test_markdown_tables_sheets_and_text_in_any_encoding(tmp_path: Path) -> None:
    found = read(tmp_path / "a.md", "intro\n# A\n```\n# no heading\n```\n## B ##\ntext")
    assert [part.heading for part in found.parts] == ["", "A", "A › B"]
    assert read(tmp_path / "a.csv", 'n;t\n1;"a\nb"\n2;\n').text == "n | t\n1 | a b\n2 | "
    book = openpyxl.Workbook()
    book.active.title = "First"  # type: ignore[union-attr]
    book.active.append(["x", 1])  # type: ignore[union-attr]
    book.create_sheet("Second").append(["y", None, 2.5])
    book.save(tmp_path / "a.xlsx")
    assert [(part.heading, part.text) for part in DOCUMENTS.read(tmp_path / "a.xlsx").parts] == [
        ("First", "x | 1"),
        ("Second", "y |  | 2.5"),
    ]
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "cp1252"):
        assert read(tmp_path / "a.txt", "Grüße\r\naus Köln".encode(encoding)).text == "Grüße\naus Köln"
    assert read(tmp_path / "Makefile", "all:\n\tcc").text == "all:\n\tcc"
    long = read(tmp_path / "a.json", '{"numbers": [' + ", ".join(map(str, range(900))) + "]}").text
    assert long.count("\n") > 900


@pytest.mark.parametrize("lies", [False, True])
def test_a_zip_bomb_named_docx_is_not_opened(tmp_path: Path, lies: bool) -> None:
    problem = DOCUMENTS.read(bomb(tmp_path / "a.docx", lies=lies)).problem
    assert problem in ("is damaged, or no docx", problem if "zip bomb" in problem else "")
    assert lies or "zip bomb" in problem


def test_what_is_no_document_says_so_and_the_next_is_read(tmp_path: Path) -> None:
    chance = random.Random(3)
    with zipfile.ZipFile(tmp_path / "zip.docx", "w") as archive:
        archive.writestr("a.txt", "x")
    rubbish = {
        "a.bin": chance.randbytes(5000),
        "a.pdf": b"%PDF-1.7\n" + chance.randbytes(500),
        "a.docx": chance.randbytes(500),
        "old.docx": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
        "a.xlsx": chance.randbytes(500),
        "a.csv": b"",
        "empty.txt": b"  \n",
    }
    for name, content in rubbish.items():
        assert read(tmp_path / name, content).problem
    for path in (tmp_path / "zip.docx", tmp_path / "gone.txt", tmp_path):
        assert DOCUMENTS.read(path).problem
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.txt")
        assert "pipe" in DOCUMENTS.read(tmp_path / "pipe.txt").problem
    assert read(tmp_path / "good.txt", "here").text == "here"


def test_cut_and_altered_documents_never_end_more_than_their_reader(tmp_path: Path) -> None:
    chance = random.Random(11)
    docx(tmp_path / "b.docx", ["# A", "text"] * 20)
    sound = {"a.pdf": pdf(["one", "two"], titles=[("A", 0)]), "a.docx": (tmp_path / "b.docx").read_bytes()}
    for name, content in sound.items():
        for _ in range(15):
            altered = bytearray(content[: chance.choice((len(content), chance.randrange(len(content))))])
            for _ in range(chance.randrange(1, 8)):
                altered[chance.randrange(len(altered))] = chance.randrange(256)
            found = read(tmp_path / name, bytes(altered))
            assert found.problem or found.text
    assert read(tmp_path / "a.pdf", sound["a.pdf"]).text == "one\n\ntwo"


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.pdf"
    with path.open("wb") as file:
        file.truncate(500 * 10**6)
    assert DOCUMENTS.read(path, most_bytes=200 * 10**6).problem == "has 500 MB, more than the 200 MB that are read"


def test_a_reader_that_crashes_hangs_or_takes_all_memory_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    reader = DocumentReader(seconds=0.0001)
    assert "more than 0 seconds" in reader.read(path).problem
    reader = DocumentReader(memory_bytes=1)
    big = tmp_path / "big.pdf"
    big.write_bytes(pdf(["x" * 50] * 3000))
    assert "memory" in reader.read(big).problem
    reader.close()
    reader = DocumentReader()
    assert reader.read(path).text == "text"

    def kill() -> bool:
        reader._process.kill()
        return False

    assert "crashed" in reader.read(big, kill).problem
    assert reader.read(path).text == "text"
    reader.close()


def test_reading_can_be_cancelled(tmp_path: Path) -> None:
    big = tmp_path / "big.pdf"
    big.write_bytes(pdf(["x" * 50] * 4000))
    reader = DocumentReader()
    with pytest.raises(RequestCancelled):
        reader.read(big, lambda: True)
    assert reader.read(big).pages == 4000
    reader.close()


def test_batches_take_the_same_documents_as_rows(tmp_path: Path) -> None:
    docx(tmp_path / "a.docx", ["one", "two"])
    (tmp_path / "b.html").write_text("<p>three")
    (row,) = open_source(tmp_path / "a.docx").rows()
    assert dict(row.fields) == {"file": "a.docx", "text": "one\n\ntwo"}
    assert [row.fields["text"] for row in open_source(tmp_path).rows()] == ["one\n\ntwo", "three"]


def test_a_folder_is_read_by_names() -> None:
    names = ("a.py", "README", "a.PDF", "Makefile", "a.jpg", "a.exe", ".env", "x.so.1", "notes")
    assert [is_readable(name) for name in names] == [True, True, True, True, False, False, False, False, False]
