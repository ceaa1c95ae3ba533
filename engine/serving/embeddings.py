"""Embeddings for programs: a process of their own computes them, so that no chat model has to make room.

It is started by the first request, holds one model at a time and ends when nobody has asked for a while:
`python -m engine.serving.embeddings` answers one `Embed` after the other from stdin.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.batch_files.openai_requests import BadRequestError
from engine.checkpoint.embedding import how_it_embeds
from engine.common.channel import Pipes
from engine.common.confined import started
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.common.paths import python_module
from engine.process.lifetime import log_to_file, quiet_libraries
from engine.process.requests import failed
from engine.process.streams import claimed_pipes
from engine.protocol import Embed, Failed, Message, Vectors, decode, encode

if TYPE_CHECKING:
    from engine.runtime.embedding import Embedder

MOST_TEXTS = 2048
MOST_DIMENSIONS = 2**20
IDLE_S = 300.0
_AT_ONCE = 16
"""Texts between two looks at whether their client is still there, and at whose turn it is."""

Text = str | list[int]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors as float32 in little-endian order, one for each text, and the tokens of all texts."""

    vectors: tuple[bytes, ...]
    tokens: int

    def numbers(self) -> Iterator[list[float]]:
        for vector in self.vectors:
            yield [float(number) for number in memoryview(vector).cast("f")]

    def in_base64(self) -> Iterator[str]:
        for vector in self.vectors:
            yield base64.b64encode(vector).decode("ascii")


def read_texts(value: Any) -> list[Text]:
    """The texts of a request: one or several, as text or as tokens."""
    is_single = isinstance(value, str) or (isinstance(value, list) and bool(value) and is_tokens(value))
    texts = [value] if is_single else value
    if not isinstance(texts, list) or not texts:
        raise BadRequestError("has no input; send a text or a list of texts")
    if len(texts) > MOST_TEXTS:
        raise BadRequestError(f"has {len(texts):,} texts; send at most {MOST_TEXTS:,} at a time")
    if not all(isinstance(text, str) or is_tokens(text) for text in texts):
        raise BadRequestError("has an input that is neither text nor a list of tokens")
    if not all(texts):
        raise BadRequestError("has an empty text in its input")
    return texts


def is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)


class Embeddings:
    """The process, and whose turn it is.  Thread-safe; a text takes its turn with those of other clients."""

    def __init__(self) -> None:
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: threading.Timer | None = None
        self._is_closed = False

    @property
    def pid(self) -> int:
        """Of the process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def embed(
        self,
        model: Path,
        texts: Sequence[Text],
        *,
        dimensions: int | None = None,
        truncates: bool = False,
        keep_s: float | None = None,
        cancelled: CancelCheck,
    ) -> Embedded:
        """The vectors of texts.

        Args:
            keep_s: how long the process stays afterwards; negative: for as long as the server does.
        """
        how_it_embeds(model)  # before a process is started for it
        vectors: list[bytes] = []
        tokens, rest = 0, iter(texts)
        while some := list(islice(rest, _AT_ONCE)):
            with self._turn:
                if cancelled():
                    raise RequestCancelled
                answer = self._asked(Embed("", model, tuple(some), dimensions, truncates))
                self._stay(IDLE_S if keep_s is None else keep_s)
            data = base64.b64decode(answer.packed)
            size = len(data) // len(some)
            vectors += [data[size * each : size * (each + 1)] for each in range(len(some))]
            tokens += answer.tokens
        return Embedded(tuple(vectors), tokens)

    def close(self) -> None:
        """Ends the process, also in the middle of a request."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _asked(self, request: Embed) -> Vectors:
        with self._lock:
            if self._is_closed:
                raise _died()
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            if self._process is None or self._process.poll() is not None:
                self._end()
                module = "engine.serving.embeddings"
                try:
                    self._process = started(module, {**os.environ, **python_module(module)[1]})
                except OSError as error:
                    what = f"The engine cannot be started: {error.strerror}."
                    raise EngineError(ErrorCode.ENGINE_DIED, what) from None
            pipes = _pipes(self._process)
        answer: Message | None = None
        with contextlib.suppress(OSError, ValueError, EOFError, EngineError):  # it has ended, or is ended meanwhile
            pipes.send_bytes(encode(request))
            answer = decode(pipes.recv_bytes())
        if isinstance(answer, Failed):
            raise answer.error
        if isinstance(answer, Vectors):
            return answer
        with self._lock:
            self._end()
        raise _died()

    def _stay(self, seconds: float) -> None:
        with self._lock:
            if seconds >= 0 and not self._is_closed:
                self._ending = threading.Timer(seconds, self._unused)
                self._ending.name, self._ending.daemon = "embeddings-idle", True
                self._ending.start()

    def _unused(self) -> None:
        if self._turn.acquire(blocking=False):  # or somebody has come
            try:
                with self._lock:
                    self._end()
            finally:
                self._turn.release()

    def _end(self) -> None:
        """Ends the process and what waits for it; the lock is held."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            pipes = _pipes(process)
            pipes.hang_up()
            pipes.close()


def _pipes(process: subprocess.Popen[bytes]) -> Pipes:
    assert process.stdin is not None
    assert process.stdout is not None
    return Pipes(process.stdout, process.stdin)


def _died() -> EngineError:
    return EngineError(ErrorCode.ENGINE_DIED, "The embedding model's process stopped: try again in a moment.")


def main() -> None:
    pipes = claimed_pipes()
    quiet_libraries()
    log_to_file("engine.log", also_stderr=False)
    embedder: Embedder | None = None
    with contextlib.suppress(EOFError):
        while True:
            asked = decode(pipes.recv_bytes())
            assert isinstance(asked, Embed)
            answer: Message
            try:
                if embedder is not None and embedder.path != asked.model:
                    leaving, embedder = embedder, None
                    leaving.close()
                embedder = embedder or _opened(asked.model)
                found = embedder.embed(list(asked.texts), dimensions=asked.dimensions, truncates=asked.truncates)
                data = found.rows.contiguous().numpy().astype("<f4").tobytes()
                answer = Vectors("", base64.b64encode(data).decode("ascii"), found.tokens)
            except Exception as error:
                answer = failed("", error, "making embeddings")
            pipes.send_bytes(encode(answer))
    os._exit(0)


def _opened(path: Path) -> Embedder:
    from engine.runtime.embedding import Embedder  # imports torch, which a request that cannot be read does without

    return Embedder(path)


if __name__ == "__main__":
    main()
