"""Estimates a prompt's tokens with the model's own tokenizer, in a separate process.

Loading a tokenizer, and encoding a long text, hold the GIL for a quarter of a second: in a thread of the window they
would block every key press that long.  And a tokenizer is third-party data: it may loop forever or exhaust memory,
which only a process can be stopped from doing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
from PySide6.QtCore import QObject, QProcess, Signal

from app.services.background import timer
from app.services.child_process import child, delete_child
from engine.common.paths import confined_module

COUNTING_S = 20
"""If a tokenizer takes longer for one question, its model's prompts are estimated by length; the process exits."""

MOST_BYTES = 2 * 2**30
"""Of the counting process."""

TOKENS_PER_TURN = 5

CHARACTERS_PER_TOKEN = 4
"""For models without `tokenizer.json`, or if the counting process cannot run."""

MOST_REMEMBERED = 2000
PAUSE_MS = 150
"""Debounce after the last key press."""
_LOOK_MS = 200


@dataclass(frozen=True, slots=True)
class _Question:
    key: str
    path: str
    texts: tuple[str, ...]
    done: Callable[[int], object] | None = None


class TokenCounter(QObject):
    """Counts one prompt at a time; while it counts, only the newest question is kept.

    Signals:
        counted: the key passed to `count`, and the approximate tokens of its texts as a prompt.
    """

    counted = Signal(str, int)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._process: QProcess | None = None
        self._asked: tuple[str, ...] | None = None
        self._question: _Question | None = None
        self._path = ""
        self._known: dict[str, int] = {}
        self._without_tokenizer = False
        self._samples: deque[_Question] = deque()
        self._is_closed = False
        self._pause = timer(self, self._ask, PAUSE_MS, once=True)
        self._watch = timer(self, self._look_at_memory, _LOOK_MS)

    def count(self, key: str, model_path: str, texts: Sequence[str]) -> None:
        """Request the tokens of `texts`, one per turn, with the tokenizer of the checkpoint at `model_path`."""
        if self._is_closed:
            return
        if self._question is not None and self._question.done is not None:
            self._samples.appendleft(self._question)
        self._question = _Question(key, model_path, tuple(texts))
        if not self._pause.isActive():
            self._pause.start()

    def measure(self, model_path: str, texts: Sequence[str], done: Callable[[int], object]) -> None:
        """Tells `done` the tokens of these texts alone, when no prompt is to be counted."""
        if self._is_closed:
            return
        self._samples.append(_Question("", model_path, tuple(texts), done))
        if not self._pause.isActive():
            self._pause.start()

    def estimate(self, model_path: str, texts: Sequence[str]) -> int:
        """The same at once: as counted where that was done already, else by length."""
        known = self._known if model_path == self._path else {}
        return sum(known.get(text, -(-len(text) // CHARACTERS_PER_TOKEN)) + TOKENS_PER_TURN for text in texts)

    def close(self) -> None:
        self._is_closed = True
        self._pause.stop()
        self._watch.stop()
        self._question = None
        self._samples.clear()
        process, self._process = self._process, None
        if process is not None:
            process.finished.disconnect()
            process.closeWriteChannel()
            process.kill()
            process.waitForFinished(1000)
            delete_child(process)
        self._asked = None

    def _ask(self) -> None:
        if self._asked is None and self._question is None and self._samples:
            self._question = self._samples.popleft()
        question = self._question
        if question is None or self._asked is not None:
            return
        if question.path != self._path or len(self._known) > MOST_REMEMBERED:
            self._path = question.path
            self._known.clear()
            self._without_tokenizer = False
        unknown = tuple({text for text in question.texts if text not in self._known})
        if self._without_tokenizer or not unknown:
            self._tell(question)
            return
        process = self._running()
        self._asked = unknown
        texts = [text.encode("utf-8", "replace").decode() for text in unknown]
        request = {"do": "count", "folder": question.path, "texts": texts, "seconds": COUNTING_S}
        process.write(json.dumps(request).encode("ascii") + b"\n")
        self._watch.start()

    def _tell(self, question: _Question) -> None:
        self._question = None
        tokens = self.estimate(question.path, question.texts)
        if question.done is not None:
            question.done(tokens - TOKENS_PER_TURN * len(question.texts))
        else:
            self.counted.emit(question.key, tokens)
        if self._samples and not self._pause.isActive():
            self._pause.start()

    def _running(self) -> QProcess:
        if self._process is None:
            command, variables = confined_module("engine.untrusted_text.child")
            lost = self._on_lost
            self._process = child(
                self, command, variables, ended=lost, not_started=lost, reads=self._on_answer, confined=True
            )
            self._process.start()
        return self._process

    def _on_answer(self) -> None:
        process = self._process
        while process is not None and self._asked is not None and process.canReadLine():
            counts = json.loads(bytes(process.readLine().data())).get("result")
            asked, self._asked = self._asked, None
            self._watch.stop()
            if counts is None:
                self._without_tokenizer = True
            else:
                self._known.update(zip(asked, counts, strict=True))
            self._ask()

    def _on_lost(self, *_how: object) -> None:
        if self._process is not None:
            delete_child(self._process)
            self._process = None
        self._asked = None
        self._watch.stop()
        self._without_tokenizer = True
        self._ask()

    def _look_at_memory(self) -> None:
        """For systems that cannot limit its memory; a process that is killed here is handled like any lost one."""
        try:
            pid = self._process.processId() if self._process is not None else 0
            if self._process is not None and pid and psutil.Process(pid).memory_info().rss > MOST_BYTES:
                self._process.kill()
        except psutil.Error:  # it has exited
            return
