"""What gave way to something slower, and why: said once to the user, and never passed over in silence.

A schedule, a pipeline, a kernel or a card that cannot do what was planned is replaced by the next best.  Whoever
replaces it says so here, in a sentence; the loaded model's note, the Monitor and `--json` show what has been said since
the model was loaded.
"""

from __future__ import annotations

import logging
import threading

_log = logging.getLogger(__name__)
_MOST = 6
"""Sentences: more than anybody reads."""


class Falls:
    """The sentences, oldest first.  Thread-safe."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._turn = threading.Lock()

    def say(self, what: str, instead: str, why: str) -> None:
        """`what` gave way to something else; said again of the same thing, the newest reason counts.

        Args:
            what: with its article, as the beginning of a sentence.
            instead: what is done now.
            why: the reason, without a full stop.
        """
        self.tell(what, f"{what} gives way to {instead}: {why.rstrip('.')}.")

    def tell(self, what: str, sentence: str) -> None:
        with self._turn:
            is_new = self._said.get(what) != sentence
            self._said[what] = sentence
            while len(self._said) > _MOST:
                del self._said[next(iter(self._said))]
        if is_new:
            _log.warning("%s", sentence)

    def is_over(self, what: str) -> None:
        with self._turn:
            self._said.pop(what, None)

    def clear(self) -> None:
        """Another model is loaded."""
        with self._turn:
            self._said.clear()

    @property
    def note(self) -> str:
        """All of it, for the user; empty if nothing gave way."""
        with self._turn:
            return " ".join(self._said.values())


FALLS = Falls()
"""Of the model that this process has loaded."""


class _PassedOver:
    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        _log.info("%s: %s", self._what, kind.__name__)  # no message: it may quote a prompt or a file
        return True


def passed_over(what: str) -> _PassedOver:
    """Within, whatever goes wrong is logged by its kind and changes nothing else: for what others wrote and may raise.

    Args:
        what: has failed then, as the beginning of a sentence.
    """
    return _PassedOver(what)
