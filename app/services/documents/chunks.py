"""Documents in pieces that are searched and quoted, and questions as what SQLite's full-text index is asked.

A piece is a paragraph or a few, never of two pages or sections, so that it has one page and one heading. Pieces do not
overlap: one after the other they are the text again; what stands around a hit is found by its place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.batch_files.documents import Part

USUAL_CHARACTERS = 900
MOST_CHARACTERS = 1300
_LEAST_SHARE = 0.5
"""Of the usual size, where a piece may end early at a better place."""
_ENDS = (
    re.compile(r"\n[ \t]*\n+"),
    re.compile(r"\n"),
    re.compile(r"[.!?…][\"'”’»)\]]*\s|[。！？；]"),
    re.compile(r"[,;:]\s|[、，]"),
    re.compile(r"\s"),
)
"""Where a text may be cut, best first; the cut is behind it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document; `page` is 0 where there are none."""

    text: str
    page: int = 0
    heading: str = ""


def chunked(parts: Iterable[Part]) -> Iterator[Chunk]:
    """The pieces of a document: those of a part have all of its characters, in order."""
    for part in parts:
        for text in _cut(part.text):
            yield Chunk(text, part.page, part.heading)


def _cut(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > MOST_CHARACTERS:
        end = _end(text, begin)
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def _end(text: str, begin: int) -> int:
    """Where the piece that begins there ends: the better place wins, then the one nearest to the usual size."""
    least, usual, most = begin + int(USUAL_CHARACTERS * _LEAST_SHARE), begin + USUAL_CHARACTERS, begin + MOST_CHARACTERS
    for kind in _ENDS:
        places = [found.end() for found in kind.finditer(text, least, most)]
        if places:
            return min(places, key=lambda place: abs(place - usual))
    return usual


# --- words ---

# Scripts without spaces between words: pairs of their signs stand for words, in the index and in questions.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]+"
)
_WORD = re.compile(r"[^\W_]+")
_MOST_WORDS, _LONGEST_WORD = 40, 64
_MOST_PAIRED, _NEAR = 12, 12
_COMMON_WORDS = (
    "a aber about according al all als also am an and any are as at au auch auf aus aux avec be been bei bin bis but "
    "by can ce ces che chi come como con could cual da dans das dass de dei del della dem den der des describe di did "
    "die dies diese dieser do doch document documents does du durch e ein eine einem einen einer eines el ella elle "
    "ellos en er es est esta este et explain file files find for from für give gli haben had has hat have how i ich "
    "if ihr il im in into is ist it its kann la las le les leur list lo los me mentioned mit more most my más nach ne "
    "nel nicht no non not nous oder of on or ou our par para pas per pero più please por pour quale que quel quelle "
    "qui quien qué say says se should show si sich sie sind so some son sono sont su such sur sus tell text than that "
    "the their them then there these they this those to un una und une uns unter us vom von vor vous war warum was we "
    "wenn wer werden were what when where which who whom whose why wie will wir wird with wo would y you your zu zum "
    "zur"
)
_COMMON = frozenset(_COMMON_WORDS.split())
"""Words of English, German, French, Spanish and Italian that are everywhere, and what asks for a document."""


def searchable(text: str) -> str:
    """The text as the index gets it: with spaces between pairs of signs where a script has none between words."""
    if text.isascii():
        return text
    return _UNSPACED.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", text)


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(max(len(run) - 1, 1))]


def asked_words(question: str) -> list[str]:
    """What a question asks for, without words that are everywhere, each once; all its words if there are no others."""
    words = [word for run in _WORD.findall(question.lower()) for word in _words_of(run)]
    telling = [word for word in words if word not in _COMMON]
    return list(dict.fromkeys(telling or words))[:_MOST_WORDS]


def _words_of(run: str) -> Iterator[str]:
    at = 0
    for unspaced in _UNSPACED.finditer(run):
        if run[at : unspaced.start()]:
            yield run[at : unspaced.start()][:_LONGEST_WORD]
        yield from _pairs(unspaced[0])
        at = unspaced.end()
    if run[at:]:
        yield run[at:][:_LONGEST_WORD]


def match_for(words: Iterable[str]) -> str:
    """An expression for FTS5 that finds any of the words, and prefers passages in which several stand together.

    Each word is quoted, so that none is an operator. Pairs that are near each other count once more for each: of 100
    questions over 1,000 pages, 97 had their passage first, and 32 without (tests/unit/test_document_index.py).
    """
    quoted = ['"' + word.replace('"', '""') + '"' for word in words]
    near = [f"NEAR({one} {two}, {_NEAR})" for one, two in itertools.combinations(quoted[:_MOST_PAIRED], 2)]
    return " OR ".join((*quoted, *near))
