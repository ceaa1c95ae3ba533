"""The engine's side of the process: requests with limits of time and memory, which whoever waits can stop."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.common.cancellation import RequestCancelled
from engine.common.paths import python_module
from engine.common.plain_text import plain_line
from engine.foreign_text.child import MEMORY_BYTES
from engine.foreign_text.templates import TemplateRefusedError

_LOOK_S = 0.02
_MOST_TRIES = 3
"""A template that was stopped so often is not tried again: thousands of rows would wait for each its time."""


def _never() -> bool:
    return False


class ForeignTextError(Exception):
    """A template or a tokenizer did not do its work; the argument says why, as the end of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take: hundreds of times what it does take.

    Attributes:
        seconds: and one more for every `characters_per_s` characters of its text.
        memory_bytes: of the whole process.
    """

    seconds: float = 20.0
    characters_per_s: int = 50_000
    memory_bytes: int = MEMORY_BYTES


class ForeignText:
    """One process, started when it is first needed, and again after it had to be ended.  For several threads.

    It holds one tokenizer at a time; the caller's own tells which.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._exchange: _Exchange | None = None
        self._held: weakref.ref[Any] | None = None
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._stopped: Counter[str] = Counter()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now, if one does."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process, if it does not run, for whoever is going to need it in a moment."""
        with self._locked(_never):
            if not self._is_alive():
                self._end()
                self._process = _started()

    def check(self, folder: Path, cancelled: Callable[[], bool]) -> None:
        """Reads the tokenizer.json of a model and tries it.

        Raises:
            ForeignTextError: it cannot be used.
            RequestCancelled: `cancelled()` came true.
        """
        with self._locked(cancelled):
            self._ask({"do": "check", "folder": str(folder)}, cancelled=cancelled)

    def hold(self, tokenizer: Any) -> None:
        """Gives the process this tokenizer, of which `encode` is asked soon; returns before it has read it."""
        with self._locked(_never):
            self._give(tokenizer)

    def drop(self, tokenizer: Any) -> None:
        """Lets go of a tokenizer that nobody needs any more."""
        with self._locked(_never):
            if self._held is not None and self._held() is tokenizer:
                self._held = None
                with contextlib.suppress(ForeignTextError):  # of what it was asked before
                    self._begin({"do": "drop"})

    def encode(self, tokenizer: Any, text: str, *, special: bool, cancelled: Callable[[], bool]) -> list[int]:
        """Tokens of a text, with what the tokenizer adds at its ends if `special`.

        Raises:
            ForeignTextError, RequestCancelled: as `check`.
        """
        return self._encoded(tokenizer, {"do": "encode", "text": text, "special": special}, cancelled)

    def encode_marked(
        self, tokenizer: Any, text: str, tokens: Sequence[str], cancelled: Callable[[], bool]
    ) -> list[int]:
        """Tokens of a text whose control tokens are marked where they are no more than text; see `marks`.

        Raises:
            ForeignTextError, RequestCancelled: as `check`.
        """
        return self._encoded(tokenizer, {"do": "encode_marked", "text": text, "tokens": list(tokens)}, cancelled)

    def render(
        self,
        template: str,
        values: Mapping[str, Any],
        cancelled: Callable[[], bool],
        *,
        control: Sequence[str] | None = None,
        maybe_control: Sequence[str] = (),
    ) -> str:
        """What a chat template writes.

        Args:
            control: tokens to mark in the values; None marks none.
            maybe_control: tokens to mark besides if the template itself writes them.

        Raises:
            TemplateRefusedError: the template is broken, or does not want these values.
            ForeignTextError, RequestCancelled: as `check`.
        """
        request = {"do": "render", "template": template, "values": values}
        if control is not None:
            request |= {"control": list(control), "maybe_control": list(maybe_control)}
        with self._locked(cancelled):
            text: str = self._ask(request, cancelled=cancelled, about=_mark(template))
        return text

    def close(self) -> None:
        """Ends the process; a later request starts another."""
        if self._lock.acquire(timeout=1.0):  # a thread that the end of the program has frozen may have it for ever
            try:
                self._end()
            finally:
                self._lock.release()

    def _encoded(self, tokenizer: Any, request: dict[str, Any], cancelled: Callable[[], bool]) -> list[int]:
        with self._locked(cancelled):
            if self._held is None or self._held() is not tokenizer or not self._is_alive():
                self._give(tokenizer)
            about = self._names.setdefault(tokenizer, f"tokenizer {next(self._numbers)}")
            ids: list[int] = self._ask(request, cancelled=cancelled, about=about)
        return ids

    @contextlib.contextmanager
    def _locked(self, cancelled: Callable[[], bool]) -> Any:
        while not self._lock.acquire(timeout=_LOOK_S):
            if cancelled():
                raise RequestCancelled
        try:
            yield
        finally:
            self._lock.release()

    def _give(self, tokenizer: Any) -> None:
        content = tokenizer.backend_tokenizer.to_str().encode("utf-8")
        self._begin({"do": "hold", "split_special": bool(tokenizer.split_special_tokens)}, content)
        self._held = weakref.ref(tokenizer)

    def _ask(self, request: dict[str, Any], *, cancelled: Callable[[], bool], about: str = "") -> Any:
        """The result of a request, within its limits."""
        if self._stopped[about] >= _MOST_TRIES:
            raise ForeignTextError(f"was stopped {_MOST_TRIES} times because it took too much time or memory")
        exchange = self._begin(request, cancelled=cancelled)
        try:
            self._wait(exchange, cancelled)
        except ForeignTextError:
            if about:
                self._stopped[about] += 1
            raise
        answer = exchange.answer
        if answer is None:
            taken = time.monotonic() - exchange.begun_s
            self._end()
            if about:
                self._stopped[about] += 1
            if taken >= exchange.seconds:
                raise _too_slow(exchange.seconds)
            raise ForeignTextError("ended the process that it ran in")
        if "problem" not in answer:
            return answer["result"]
        if answer["kind"] == "refused":
            raise TemplateRefusedError(plain_line(answer["problem"]))
        if answer["kind"] == "memory":
            self._end()  # which may still hold most of it
            if about:
                self._stopped[about] += 1
            raise _too_big(self.limits.memory_bytes)
        raise ForeignTextError(f"fails ({plain_line(answer['problem']).rstrip('.')})")

    def _begin(
        self, request: dict[str, Any], body: bytes = b"", *, cancelled: Callable[[], bool] = _never
    ) -> _Exchange:
        """Sends a request behind one whose answer nobody has waited for yet."""
        before = self._exchange
        if before is not None:
            self._wait(before, cancelled)
            if before.answer is None or "problem" in before.answer:
                self._end()
                why = (before.answer or {}).get("problem", "it ended the process that it ran in")
                raise ForeignTextError(f"fails ({plain_line(why).rstrip('.')})")
        if not self._is_alive():
            self._end()
            self._process = _started()
        assert self._process is not None
        line = json.dumps(request)
        seconds = self.limits.seconds + (len(line) + len(body)) / self.limits.characters_per_s
        head = json.dumps({**request, "seconds": seconds, "bytes": len(body)}).encode("ascii") + b"\n"
        self._exchange = _Exchange(self._process, head + body, seconds)
        return self._exchange

    def _wait(self, exchange: _Exchange, cancelled: Callable[[], bool]) -> None:
        """Until the answer is there or the process has ended; ends it if it takes too much or is not wanted."""
        try:
            while not exchange.done.wait(_LOOK_S):
                if cancelled():
                    raise RequestCancelled
                if time.monotonic() - exchange.begun_s > exchange.seconds + 1.0:  # it was to end itself before that
                    raise _too_slow(exchange.seconds)
                if _memory_of(exchange.process) > self.limits.memory_bytes:
                    raise _too_big(self.limits.memory_bytes)
        except BaseException:
            self._end()
            raise
        exchange.thread.join()
        if self._exchange is exchange:
            self._exchange = None

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _end(self) -> None:
        process, self._process = self._process, None
        exchange, self._exchange = self._exchange, None
        self._held = None
        if process is not None:
            process.kill()
            if exchange is not None:
                exchange.thread.join()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            process.wait()


class _Exchange:
    """One request on its way and its answer, in a thread: a pipe cannot be waited for with a limit everywhere."""

    def __init__(self, process: subprocess.Popen[bytes], request: bytes, seconds: float) -> None:
        self.process, self.seconds = process, seconds
        self.begun_s = time.monotonic()
        self.done = threading.Event()
        self.answer: dict[str, Any] | None = None
        """None until it is there; for good if the process has ended."""
        self._request = request
        self.thread = threading.Thread(target=self._run, name="foreign-text", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(self._request)
            self.process.stdin.flush()
            self.answer = json.loads(self.process.stdout.readline())
        except (OSError, ValueError):  # it has ended, perhaps in the middle of an answer
            pass
        finally:
            self.done.set()


def _started() -> subprocess.Popen[bytes]:
    command, variables = python_module("engine.foreign_text.child")
    # Ctrl-C in a terminal is for whoever waits here, who ends the process.
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables, "TOKENIZERS_PARALLELISM": "false"},
        **apart,
    )


def _memory_of(process: subprocess.Popen[bytes]) -> int:
    try:
        return int(psutil.Process(process.pid).memory_info().rss)
    except psutil.Error:  # it has ended, which is seen elsewhere
        return 0


def _too_slow(seconds: float) -> ForeignTextError:
    return ForeignTextError(f"was stopped because it had not ended after {seconds:.0f} seconds")


def _too_big(memory_bytes: int) -> ForeignTextError:
    return ForeignTextError(f"was stopped because it took more than {memory_bytes / 2**30:.2g} GiB of memory")


def _mark(template: str) -> str:
    return hashlib.sha256(template.encode("utf-8", "replace")).hexdigest()


FOREIGN_TEXT = ForeignText()
"""This process's own, for all its models."""

atexit.register(FOREIGN_TEXT.close)
