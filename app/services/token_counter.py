"""About how many tokens a prompt has, counted with the model's own tokenizer and off the GUI thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, Signal

from app.services.background import BackgroundCall

TOKENS_PER_TURN = 5
"""What a chat template adds around a turn, more or less."""

CHARACTERS_PER_TOKEN = 4
"""Where the model has no `tokenizer.json`."""

MOST_REMEMBERED = 2000


class TokenCounter(QObject):
    """Counts one prompt at a time; while it counts, only the newest question is remembered.

    Signals:
        counted: the key that `count` was given, and about how many tokens its texts have as a prompt.
    """

    counted = Signal(str, int)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._call: BackgroundCall | None = None
        self._next: tuple[str, str, tuple[str, ...]] | None = None
        self._path = ""
        self._tokenizer: Any = None
        self._known: dict[str, int] = {}

    def count(self, key: str, model_path: str, texts: Sequence[str]) -> None:
        """Ask for the tokens of `texts`, one per turn, with the tokenizer of the checkpoint at `model_path`."""
        self._next = (key, model_path, tuple(texts))
        if self._call is None:
            self._run_next()

    def wait(self) -> None:
        """Wait for a count under way; for the end of the window."""
        self._next = None
        if self._call is not None:
            self._call.wait()

    def _run_next(self) -> None:
        if self._next is None:
            return
        key, path, texts = self._next
        self._next = None
        call = self._call = BackgroundCall(lambda: self._count(path, texts), self)
        call.done.connect(lambda tokens: self._on_done(key, tokens))
        call.failed.connect(lambda _: self._on_done(key, None))
        call.start()

    def _on_done(self, key: str, tokens: int | None) -> None:
        if self._call is not None:
            self._call.deleteLater()
            self._call = None
        if tokens is not None:
            self.counted.emit(key, tokens)
        self._run_next()

    # --- on the other thread; one call at a time ---

    def _count(self, path: str, texts: tuple[str, ...]) -> int:
        if path != self._path:
            self._path = path
            self._known.clear()
            self._tokenizer = _load(path)
        if len(self._known) > MOST_REMEMBERED:
            self._known.clear()
        return sum(self._tokens(text) + TOKENS_PER_TURN for text in texts)

    def _tokens(self, text: str) -> int:
        if self._tokenizer is None:
            return -(-len(text) // CHARACTERS_PER_TOKEN)
        if text not in self._known:
            self._known[text] = len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return self._known[text]


def _load(path: str) -> Any:
    file = Path(path) / "tokenizer.json"
    if not path or not file.is_file():
        return None
    from tokenizers import Tokenizer  # only when something is counted, and not on the GUI thread

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises bare Exception; an estimate by length still serves
        return None
