"""The child process: `python -m engine.foreign_text.child`, one line of JSON in, one out, until stdin ends.

    {"do": "check", "folder": F}                          whether its tokenizer.json is usable
    {"do": "count", "folder": F, "texts": [...]}          token count of each; null without a usable tokenizer
    {"do": "hold", "bytes": N, "split_special": B}        loads the tokenizer from the N bytes of JSON after the line
    {"do": "drop"}                                        releases it
    {"do": "encode", "text": T, "special": B}             ids, by the loaded tokenizer
    {"do": "encode_marked", "text": T, "tokens": [...]}   see `marks`
    {"do": "render", "template": T, "values": {...}}      the text; with "control" and "maybe_control" marks in it

Every request has `seconds`: one that takes longer ends the whole process; and `most_bytes`, which rendering may take.
An answer is {"result": ...} or {"problem": why, "kind": "refused" | "memory" | "broken"}. Memory is limited where the
system allows it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from engine.checkpoint.gguf.names import gguf_at
from engine.common.foreign import read_foreign
from engine.foreign_text.marks import encode_marked, marked
from engine.foreign_text.templates import TemplateRefusedError, literal_text, render

MEMORY_BYTES = 2 * 2**30
MOST_TOKENIZER_BYTES = 256 * 2**20
MOST_IDS = 2**24
TOKENIZER_NAME = "tokenizer.json"
_SAMPLE = (
    "Hello, world!  It's 2024: naïve café №1 — 你好, привет, नमस्ते 👋🏽\n\n"
    "\tdef f(x): return [x ** 2 for _ in 'aaaa']\r\n"
)


class _BackendEncoder:
    """The `tokenizers` library, used as transformers uses it."""

    def __init__(self, content: bytes, *, split_special: bool = False) -> None:
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(content.decode("utf-8"))
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = split_special

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        return ids

    def encode_as_text(self, text: str) -> list[int]:
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer is not None:
            splits = [split for split, _place in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in backend.model.tokenize(split)]

    def token_id(self, token: str) -> int | None:
        index: int | None = self._backend.token_to_id(token)
        return index

    def decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


class _Child:
    def __init__(self) -> None:
        self._held: _BackendEncoder | None = None
        self._counting: tuple[str, _BackendEncoder | None] = ("", None)

    def answer(self, request: dict[str, Any], body: bytes) -> Any:
        """The result of a request; raises any error."""
        match request["do"]:
            case "check":
                return self._check(request["folder"])
            case "count":
                return self._count(request["folder"], request["texts"])
            case "hold":
                self._held = None  # free its memory first
                self._held = _BackendEncoder(body, split_special=request["split_special"])
                return None
            case "drop":
                self._held = None
                return None
            case "encode":
                assert self._held is not None
                return _not_too_many(self._held.encode(request["text"], special=request["special"]))
            case "encode_marked":
                assert self._held is not None
                return _not_too_many(encode_marked(self._held, request["text"], request["tokens"]))
            case "render":
                return _rendered(request)
        raise ValueError(f"unknown request {request['do']!r}")

    def _check(self, folder: str) -> None:
        encoder = _read(folder)
        ids = encoder.encode(_SAMPLE)
        if len(ids) > 100 * len(_SAMPLE) or len(encoder.decode(ids)) > 100 * len(_SAMPLE):
            raise ValueError("it makes text many times longer")

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
        from engine.checkpoint.gguf.tokenizer import tokenizer_files

        return _BackendEncoder(tokenizer_files(read_gguf(gguf).metadata, gguf)[TOKENIZER_NAME].encode())
    return _BackendEncoder(read_foreign(Path(folder) / TOKENIZER_NAME, MOST_TOKENIZER_BYTES))


def _rendered(request: dict[str, Any]) -> str:
    template, values = request["template"], request["values"]
    with _at_most(request["most_bytes"]):
        if "control" in request:
            text = literal_text(template)
            maybe = [token for token in request["maybe_control"] if token in text and not token.isspace()]
            values = marked(values, [*request["control"], *maybe])
        return render(template, values)


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
        with _dies_after(request["seconds"]):
            reply = _reply(child, request, body)
        answers.write(reply)
        answers.flush()


@contextlib.contextmanager
def _dies_after(seconds: float) -> Iterator[None]:
    """Ends this process if it is not done by then, even if a library holds the GIL forever."""
    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the system's own end, which needs nothing of Python
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        with open(os.devnull, "wb") as nowhere:
            # A C thread.  It reads the frames of a thread that runs, which may crash: the end is the same.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()


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


def limit_memory() -> None:
    """Limits this process to `MEMORY_BYTES` where the system allows it; the parent watches it too."""
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    limit_memory()
    serve(sys.stdin.buffer, sys.stdout.buffer)
