"""The parent's side: cancellable requests with time and memory limits."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.common.confined import LOOK_S, ConfinedChild, Exchange
from engine.common.errors import CancelCheck, RequestCancelled, never_cancelled
from engine.common.plain_text import plain_line
from engine.untrusted_text.child import MEMORY_BYTES, TOKENIZER_NAME
from engine.untrusted_text.templates import Spans, TemplateRefusedError

_SENT_WITHIN_S = 0.1
_MOST_TRIES = 3
"""Attempts after which a template that was stopped is not retried: thousands of rows would wait for each."""


class UntrustedTextError(Exception):
    """A template or a tokenizer failed; the argument says why, completing a sentence about it."""


class TooManyTokensError(Exception):
    """A text has about so many `tokens`, clearly more than `most_tokens`."""

    def __init__(self, tokens: int, most_tokens: int) -> None:
        super().__init__(f"{tokens:,} tokens")
        self.tokens, self.most_tokens = tokens, most_tokens


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request: hundreds of times its normal use.

    Attributes:
        seconds: plus one for every `characters_per_s` characters of its text.
        memory_bytes: of the whole process.
        template_bytes: that rendering a template may take, plus sixteen for every character of its text; only where
            the system can limit it.
    """

    seconds: float = 20.0
    characters_per_s: int = 50_000
    memory_bytes: int = MEMORY_BYTES
    template_bytes: int = 256 * 2**20


class Rendered(NamedTuple):
    """What a template made of a conversation, and the parts of it that the template itself wrote."""

    text: str
    written: Spans


class UntrustedText(ConfinedChild):
    """Renders templates and encodes texts.

    It holds one tokenizer at a time, identified by the caller's object.
    """

    module = "engine.untrusted_text.child"

    def __init__(self, limits: RequestLimits | None = None) -> None:
        super().__init__()
        self.limits = limits or RequestLimits()
        self._held: weakref.ref[Any] | None = None
        self._checked: Path | None = None
        """Whose tokenizer the process still has from a check."""
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._stopped: Counter[str] = Counter()
        self._early: tuple[tuple[object, ...], Future[None]] | None = None
        self._sent = threading.Event()
        """Set when a request has been sent."""
        self._closed = threading.Event()
        """Set when closed, and then replaced: an early check that was begun before must not start another process."""

    @property
    def pid(self) -> int | None:
        """The id of the running process, if any."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process, if it is not running, before it is needed."""
        if self._lock.acquire(blocking=False):  # who has it starts it
            try:
                self._child()
            finally:
                self._lock.release()

    def begin_check(self, folder: Path) -> None:
        """Begins the next `check` of this folder on a thread, if it has a tokenizer.json."""
        asked, checked = _identity(folder), Future[None]()
        if asked is not None and (self._early is None or self._early[0] != asked):
            self._early = (asked, checked)
            arguments = (folder, checked, self._closed.is_set)
            self._sent.clear()
            threading.Thread(target=self._check_early, args=arguments, name="early-check", daemon=True).start()
            self._sent.wait(_SENT_WITHIN_S)  # or whoever asked might hold the interpreter before this thread runs

    def check(self, folder: Path, cancelled: CancelCheck) -> None:
        """Loads a model's tokenizer.json and tries it.

        Raises:
            UntrustedTextError: it is unusable.
        """
        early, self._early = self._early, None
        if early is not None and early[0] == _identity(folder):
            while not early[1].done():
                if cancelled():
                    raise RequestCancelled
                wait([early[1]], timeout=LOOK_S)
            early[1].result()
            return
        with self._locked(cancelled):
            self._check(folder, cancelled)

    def _check(self, folder: Path, cancelled: CancelCheck) -> None:
        self._checked = None
        self._ask({"do": "check", "folder": str(folder)}, cancelled=cancelled)
        self._checked = folder

    def _check_early(self, folder: Path, checked: Future[None], closed: CancelCheck) -> None:
        try:
            with self._locked(closed):
                if closed():
                    raise RequestCancelled
                self._check(folder, closed)
            checked.set_result(None)
        except BaseException as error:  # told to whoever asks
            checked.set_exception(error)

    def hold(self, tokenizer: Any, folder: Path | None = None) -> None:
        """Sends the tokenizer to the process for later `encode` calls; does not wait for it to load.

        Args:
            folder: whose tokenizer.json makes the same tokens: if that was the last one checked, nothing need be sent.
        """
        with self._locked(never_cancelled):
            if folder is None or folder != self._checked or not self._is_alive():
                self._give(tokenizer)
                return
            self._checked = None
            self._begin({"do": "hold_checked", "split_special": bool(tokenizer.split_special_tokens)})
            self._held = weakref.ref(tokenizer)

    def drop(self, tokenizer: Any) -> None:
        """Releases a tokenizer that is no longer needed."""
        with self._locked(never_cancelled):
            if self._held is not None and self._held() is tokenizer:
                self._held = self._checked = None
                with contextlib.suppress(UntrustedTextError):  # from an earlier request
                    self._begin({"do": "drop"})

    def encode(
        self,
        tokenizer: Any,
        text: str,
        *,
        special: bool,
        written: Spans | None = None,
        cancelled: CancelCheck,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Tokens of a text, including the tokens that it adds at the ends if `special`.

        Args:
            written: the parts of it in which a control token is read as such, and not as text; None for all.

        Raises:
            TooManyTokensError: a part of it has more than `most_tokens`.
        """
        with self._locked(cancelled):
            if self._held is None or self._held() is not tokenizer or not self._is_alive():
                self._give(tokenizer)
            about = self._names.setdefault(tokenizer, f"tokenizer {next(self._numbers)}")
            request = {"do": "encode", "special": special, "written": written, "most_tokens": most_tokens}
            body = text.encode("utf-8", "replace")  # JSON of megabytes would keep all other threads waiting
            ids: list[int] | int = self._ask(request, body, cancelled=cancelled, about=about)
        if isinstance(ids, int):
            raise TooManyTokensError(ids, most_tokens or 0)
        return ids

    def render(
        self,
        template: str,
        values: Mapping[str, Any],
        cancelled: CancelCheck,
        *,
        own: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The output of a chat template.

        Args:
            own: more values, whose control tokens are the template's.

        Raises:
            TemplateRefusedError: the template is broken, or rejects these values.
        """
        request = {"do": "render", "template": template, "values": values, "own": own or {}}
        with self._locked(cancelled):
            result = self._ask(request, cancelled=cancelled, about=_mark(template))
        return Rendered(**result)

    def close(self) -> None:
        """Ends the process and an early check, too; a later request starts another."""
        closed, self._closed = self._closed, threading.Event()
        closed.set()
        super().close()

    def over(self, seconds: float, nbytes: int = 0) -> Exception:
        used = (
            f"used more than {nbytes / 2**20:,.0f} MiB of memory" if nbytes else f"took more than {seconds:.0f} seconds"
        )
        return UntrustedTextError(f"was stopped: it {used}")

    def _give(self, tokenizer: Any) -> None:
        content = tokenizer.backend_tokenizer.to_str().encode("utf-8")
        self._checked = None
        self._begin({"do": "hold", "split_special": bool(tokenizer.split_special_tokens)}, content)
        self._held = weakref.ref(tokenizer)

    def _ask(self, request: dict[str, Any], body: bytes = b"", *, cancelled: CancelCheck, about: str = "") -> Any:
        """The result of a request, within its limits."""
        if self._stopped[about] >= _MOST_TRIES:
            raise UntrustedTextError(f"was stopped {_MOST_TRIES} times for using too much time or memory")
        exchange = self._begin(request, body, cancelled)
        try:
            self._wait(exchange, cancelled, self.limits.memory_bytes)
        except UntrustedTextError:
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
                raise self.over(exchange.seconds)
            raise UntrustedTextError("crashed its process")
        if "problem" not in answer:
            return answer["result"]
        if answer["kind"] == "refused":
            raise TemplateRefusedError(plain_line(answer["problem"]))
        if answer["kind"] == "memory":
            self._end()  # it may still hold most of the memory
            if about:
                self._stopped[about] += 1
            most_bytes = self.limits.template_bytes if request["do"] == "render" else self.limits.memory_bytes
            raise self.over(0, most_bytes)
        raise UntrustedTextError(f"fails ({plain_line(answer['problem']).rstrip('.')})")

    def _begin(self, request: dict[str, Any], body: bytes = b"", cancelled: CancelCheck = never_cancelled) -> Exchange:
        """Sends a request, after collecting an earlier request's pending answer."""
        before = self._exchange
        if before is not None:
            self._wait(before, cancelled, self.limits.memory_bytes)
            if before.answer is None or "problem" in before.answer:
                self._end()
                why = (before.answer or {}).get("problem", "it crashed its process")
                raise UntrustedTextError(f"fails ({plain_line(why).rstrip('.')})")
        process = self._child()
        line = json.dumps(request)
        seconds = self.limits.seconds + (len(line) + len(body)) / self.limits.characters_per_s
        most_bytes = self.limits.template_bytes + 16 * len(line)
        limits = json.dumps({"seconds": seconds, "bytes": len(body), "most_bytes": most_bytes})
        head = f"{line[:-1]}, {limits[1:]}\n".encode("ascii")
        self._exchange = Exchange(process, head + body, seconds, self._sent)
        return self._exchange

    def _end(self) -> None:
        self._held = self._checked = None
        super()._end()


def _identity(folder: Path) -> tuple[object, ...] | None:
    """Of the file that is checked; None if it is not there."""
    try:
        status = (folder / TOKENIZER_NAME).stat()
    except OSError:
        return None
    return str(folder), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _mark(template: str) -> str:
    return hashlib.sha256(template.encode("utf-8", "replace")).hexdigest()


UNTRUSTED_TEXT = UntrustedText()
"""Shared by all models of this process."""

atexit.register(UNTRUSTED_TEXT.close)
