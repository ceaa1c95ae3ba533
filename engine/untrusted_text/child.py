"""The child process: `python -m engine.untrusted_text.child`, one line of JSON in, one out, until stdin ends.

    {"do": "check", "folder": F}                          whether its tokenizer.json is usable
    {"do": "count", "folder": F, "texts": [...]}          token count of each; null without a usable tokenizer
    {"do": "hold", "bytes": N, "split_special": B}        loads the tokenizer from the N bytes of JSON after the line
    {"do": "hold_checked", "split_special": B}            takes the one of the last check
    {"do": "drop"}                                        releases it
    {"do": "encode", "bytes": N, "special": B, "written": W, "most_tokens": M}
        ids of the text after the line, by the loaded tokenizer; control tokens are read in the spans W alone, or
        anywhere if that is null; only about how many there are if a part of the text has more than M
    {"do": "render", "template": T, "values": {...}, "own": {...}}
        the text, and the spans of it that the template wrote or had from its "own" values

Every request has `seconds`: one that takes longer ends the whole process; and `most_bytes`, which rendering may take.
An answer is {"result": ...} or {"problem": why, "kind": "refused" | "memory" | "broken"}. Memory is limited where the
system allows it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from engine.checkpoint.gguf import gguf_at
from engine.common.chat import ROLES
from engine.common.confined import dies_after, limit_memory
from engine.common.falls import passed_over
from engine.common.untrusted import read_untrusted
from engine.untrusted_text.templates import Spans, TemplateRefusedError, is_control, own, own_bytes, render, spans_of

MEMORY_BYTES = 2 * 2**30
MOST_TOKENIZER_BYTES = 256 * 2**20
MOST_IDS = 2**24
_TOKEN_CHARACTERS = 8
"""Few tokens of a text are longer."""
_MOST_ROUNDS = 16
"""In which untrusted control tokens are blanked: two do for all but those that have others in them."""
TOKENIZER_NAME = "tokenizer.json"
_SAMPLE = (
    "Hello, world!  It's 2024: naïve café №1 — 你好, привет, नमस्ते 👋🏽\n\n"
    "\tdef f(x): return [x ** 2 for _ in 'aaaa']\r\n"
)


class _Mark(NamedTuple):
    """An added token in a text: its id, the place of all that it takes, and that without spaces at its ends."""

    token: int
    begin: int
    end: int
    first: int
    last: int


class _BackendEncoder:
    """The `tokenizers` library, used as transformers uses it."""

    def __init__(self, content: bytes, *, split_special: bool = False) -> None:
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(content.decode("utf-8"))
        self._backend.no_truncation()
        self._backend.no_padding()
        self.split_special(split_special)
        self._model = self._backend.model
        self._added = self._backend.get_added_tokens_decoder()
        self._control = {
            index for index, token in self._added.items() if is_control(token.content, special=token.special)
        }
        contents = set().union(*(token.content for token in self._added.values()))
        self._blank = next(sign for sign in map(chr, range(0x2801, 0x2900)) if sign not in contents)
        """A sign that is part of no added token and that no normaliser changes."""
        self._unknown: set[int] = set()
        with passed_over("The vocabulary has nothing for unknown signs"):  # as one of words may
            self._unknown.update(self._of_model("\U00100000"))

    def split_special(self, splits: bool) -> None:
        self._backend.encode_special_tokens = splits

    def encode(self, text: str, *, special: bool = False, written: Spans | None = None) -> list[int]:
        """Tokens of a text, with what the tokenizer adds at its ends if `special`.

        Args:
            written: the parts in which a control token is read as such; None for all.

        Raises:
            ValueError: a control token cannot be written as text.
        """
        backend = self._backend
        if written is None:
            ids: list[int] = backend.encode(text, add_special_tokens=special).ids
            return ids
        processor, backend.post_processor = backend.post_processor, None  # it moves the tokens' places
        try:
            ids = self._encode_written(text, own_bytes(len(text), written))
        finally:
            backend.post_processor = processor
        if special:
            sample = backend.encode("a")
            ends = list(zip(sample.ids, sample.special_tokens_mask, strict=True))
            before, after = (itertools.takewhile(lambda end: end[1], way) for way in (ends, reversed(ends)))
            ids = [index for index, _ in (*before, *((index, 0) for index in ids), *reversed(list(after)))]
        return ids

    def _encode_written(self, text: str, own: bytearray) -> list[int]:
        """As the library encodes it, if no control token that it reads is untrusted.

        Where some are, their characters are blanked until there are none, which shows the others. What is between those
        is then encoded as the library does, but for its search for added tokens.
        """
        shown = text
        for _ in range(_MOST_ROUNDS):
            found = self._backend.encode(shown, add_special_tokens=False)
            marks = list(self._marks(shown, found))
            forged = [mark for mark in marks if mark.token in self._control and not _is_within(own, mark)]
            if not forged:
                return list(found.ids) if shown is text else self._encode_between(text, marks)
            signs = list(shown)
            for mark in forged:
                for place in range(mark.first, mark.last):
                    if not own[place]:
                        signs[place] = self._blank
            shown = "".join(signs)
        raise ValueError("a control token in the text cannot be written as text")

    def _marks(self, text: str, encoding: Any) -> Iterator[_Mark]:
        for index, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._added.get(index)
            if token is None:
                continue
            part = text[begin:end]
            first = begin + (len(part) - len(part.lstrip()) if token.lstrip else 0)
            last = end - (len(part) - len(part.rstrip()) if token.rstrip else 0)
            is_written = token.content in (part := text[first:last])
            if index in self._unknown and not is_written and self._backend.normalizer is not None:
                is_written = token.content in self._backend.normalizer.normalize_str(part)
            # Others are what the model makes of a word: a mark must not be, but may be what it does not know.
            if is_written or (index in self._control and index not in self._unknown):
                yield _Mark(index, begin, end, first, last)

    def _encode_between(self, text: str, marks: Sequence[_Mark]) -> list[int]:
        from tokenizers import PreTokenizedString

        # One sign for each mark, at which the library divides the text much faster than at places.
        used = set(text)
        sign = next(sign for sign in map(chr, range(0xF0000, 0x110000)) if sign not in used)
        bounds = [0, *(place for mark in marks for place in (mark.begin, mark.end)), len(text)]
        text = sign.join(text[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True))
        pieces = PreTokenizedString(text)
        pieces.split(lambda _, whole: whole.split(sign, "removed"))
        if self._backend.normalizer is not None:
            pieces.normalize(self._backend.normalizer.normalize)
        if self._backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer.pre_tokenize(pieces)
        ids: list[int] = []
        known: dict[str, list[int]] = {}
        places = [found.start() for found in re.finditer(sign, text)]
        ahead = list(zip(places, marks, strict=True))[::-1]
        for word, (begin, _), _ in pieces.get_splits():
            while ahead and ahead[-1][0] < begin:
                ids.append(ahead.pop()[1].token)
            if word not in known:
                known[word] = self._as_text(word)
            ids += known[word]
        return [*ids, *(mark.token for _, mark in reversed(ahead))]

    def _as_text(self, word: str) -> list[int]:
        """Tokens of a word; its characters' if the model itself makes a control token of it."""
        ids = self._of_model(word)
        if not self._forges(ids):
            return ids
        ids = [index for character in word for index in self._of_model(character)]
        if self._forges(ids):
            raise ValueError("a control token in the text cannot be written as text")
        return ids

    def _forges(self, ids: list[int]) -> bool:
        return any(index in self._control and index not in self._unknown for index in ids)

    def _of_model(self, word: str) -> list[int]:
        return [token.id for token in self._model.tokenize(word)]

    def decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


class _Child:
    def __init__(self) -> None:
        self._held: _BackendEncoder | None = None
        self._checked: _BackendEncoder | None = None
        self._counting: tuple[str, _BackendEncoder | None] = ("", None)

    def answer(self, request: dict[str, Any], body: bytes) -> Any:
        """The result of a request; raises any error."""
        match request["do"]:
            case "check":
                return self._check(request["folder"])
            case "count":
                return self._count(request["folder"], request["texts"])
            case "hold":
                self._held = self._checked = None  # free their memory first
                self._held = _BackendEncoder(body, split_special=request["split_special"])
                return None
            case "hold_checked":
                self._held, self._checked = self._checked, None
                assert self._held is not None
                self._held.split_special(request["split_special"])
                return None
            case "drop":
                self._held = self._checked = None
                return None
            case "encode":
                assert self._held is not None
                text = body.decode("utf-8")
                if (tokens := _clearly_more(self._held.encode, text, request["most_tokens"])) is not None:
                    return tokens
                return _not_too_many(self._held.encode(text, special=request["special"], written=request["written"]))
            case "render":
                return _rendered(request)
        raise ValueError(f"unknown request {request['do']!r}")

    def _check(self, folder: str) -> None:
        self._checked = None
        encoder = _read(folder)
        ids = encoder.encode(_SAMPLE)
        if len(ids) > 100 * len(_SAMPLE) or len(encoder.decode(ids)) > 100 * len(_SAMPLE):
            raise ValueError("it makes text many times longer")
        self._checked = encoder

    def _count(self, folder: str, texts: list[str]) -> list[int] | None:
        if self._counting[0] != folder:
            self._counting = (folder, None)  # do not retry a failed one for every text
            try:
                self._counting = (folder, _read(folder) if folder else None)
            except MemoryError:
                raise
            except BaseException:  # the library raises bare `Exception` and `BaseException`
                return None
        encoder = self._counting[1]
        return [len(encoder.encode(text)) for text in texts] if encoder is not None else None


def _read(folder: str) -> _BackendEncoder:
    gguf = gguf_at(Path(folder))
    if gguf is not None:
        from engine.checkpoint.gguf.file import read_gguf  # imports numpy, which others do not need
        from engine.checkpoint.gguf.kept_tokenizer import kept_tokenizer
        from engine.checkpoint.gguf.tokenizer import tokenizer_files

        file = read_gguf(gguf)
        kept = kept_tokenizer(file)
        if kept is None:
            return _BackendEncoder(tokenizer_files(file.metadata, gguf)[TOKENIZER_NAME].encode())
        folder = str(kept)
    return _BackendEncoder(read_untrusted(Path(folder) / TOKENIZER_NAME, MOST_TOKENIZER_BYTES))


def _is_within(own: bytearray, mark: _Mark) -> bool:
    return mark.first < mark.last and own.find(0, mark.first, mark.last) < 0


def _rendered(request: dict[str, Any]) -> dict[str, Any]:
    values = {**request["values"], **own(request["own"])}
    turns = values.get("messages")
    if isinstance(turns, list):
        values["messages"] = [_with_own_role(turn) for turn in turns]
    with _at_most(request["most_bytes"]):
        text = render(request["template"], values)
    # Half a surrogate pair would become one character with its neighbour on the way, so that places were others.
    return {"text": str.encode(text, "utf-8", "replace").decode("utf-8"), "written": spans_of(text)}


def _with_own_role(turn: Any) -> Any:
    """A turn with a role that is one of ours, not untrusted text: templates make control tokens of it."""
    return {**turn, "role": own(turn["role"])} if isinstance(turn, dict) and turn.get("role") in ROLES else turn


@contextlib.contextmanager
def _at_most(nbytes: int) -> Iterator[None]:
    """Limits what the block may allocate, where the system allows it: `MemoryError` is raised for more."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/status").read_text(encoding="ascii").partition("VmData:")[2].split()[0]) * 1024
    limits = [used + nbytes, *(limit for limit in (before, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _clearly_more(encode: Callable[[str], list[int]], text: str, most_tokens: int | None) -> int | None:
    """About how many tokens a text has, if its beginning alone has more than `most_tokens`; so it takes no longer to
    refuse a text of any length than to read the longest that is not refused."""
    most, part = most_tokens or 0, _TOKEN_CHARACTERS * (most_tokens or 0)
    while 0 < part < len(text):
        tokens = len(encode(text[:part]))
        if tokens > most + most // 8:  # what follows may change its last ones
            return tokens * len(text) // part
        part *= 4
    return None


def _not_too_many(ids: list[int]) -> list[int]:
    if len(ids) > MOST_IDS:
        raise ValueError(f"it turns the text into {len(ids):,} tokens")
    return ids


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until there are no more."""
    child = _Child()
    while line := requests.readline():
        request = json.loads(line)
        body = requests.read(request.get("bytes", 0))
        with dies_after(request["seconds"]):
            reply = _reply(child, request, body)
        answers.write(reply)
        answers.flush()


def _reply(child: _Child, request: dict[str, Any], body: bytes) -> bytes:
    try:
        answer = {"result": child.answer(request, body)}
    except TemplateRefusedError as error:
        answer = {"problem": str(error), "kind": "refused"}
    except MemoryError:
        answer = {"problem": "it takes too much memory", "kind": "memory"}
    except BaseException as error:  # libraries written in Rust raise bare `BaseException`
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        answer = {"problem": why, "kind": "broken"}
    return json.dumps(answer).encode("ascii") + b"\n"


if __name__ == "__main__":
    limit_memory(MEMORY_BYTES)
    serve(sys.stdin.buffer, sys.stdout.buffer)
