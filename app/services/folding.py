"""Summaries of the earlier turns of long chats, written by the chat's own model while it has nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from PySide6.QtCore import QCoreApplication, QObject, Signal

from app.services.answer_queue import AnswerQueue
from app.services.chat_store import Fold, Message
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import ChatAnswer
from app.services.kept import THINKING_TOKENS, own_sampling
from engine.common.config import SamplingParams
from engine.protocol import ChatMessage, Failed, Finished, Progress, Token
from engine.remote.endpoint import RemoteModel

translate = QCoreApplication.translate

LEAST_TOKENS, MOST_TOKENS = 128, 1024
_SPARE_TOKENS = 200
"""For the instruction, and what a chat template adds."""
_LEAST_PIECE = 64
_CHARACTERS_PER_TOKEN = 3
_READING_SHARE = 0.6
"""Of the time that a piece takes."""
_INSTRUCTION = (
    "Write a summary of the conversation below, which will stand in for it. Keep what later turns may need: names, "
    "numbers, decisions, what was asked for, what was found, and what is still open. Write in the language of the "
    "conversation, in plain sentences, {0} words at most. Write the summary and nothing else."
)
_CUE = "Now write the summary of the conversation above, {0} words at most, with its names and numbers."
"""Small models follow what they read last."""
_SO_FAR = "Summary of what came before:"
_NAMES = {"user": "User", "assistant": "Assistant", "system": "System"}


def summary_tokens(limit: int) -> int:
    return max(LEAST_TOKENS, min(MOST_TOKENS, limit // 8))


def pieces_of(turns: Iterable[Message], room: int, count: Callable[[str], int]) -> list[str]:
    pieces: list[str] = []
    piece, size = "", 0
    for text in _cut(turns, room, count):
        tokens = count(text)
        if piece and size + tokens > room:
            pieces.append(piece)
            piece, size = "", 0
        piece, size = f"{piece}\n\n{text}" if piece else text, size + tokens
    return [*pieces, piece] if piece else pieces


def _cut(turns: Iterable[Message], room: int, count: Callable[[str], int]) -> Iterable[str]:
    for turn in turns:
        text = f"{_NAMES[turn.role]}: {turn.content.strip()}"
        if not turn.content.strip():
            continue
        if count(text) <= room:
            yield text
        else:
            step = max(room, _LEAST_PIECE) * _CHARACTERS_PER_TOKEN
            yield from (text[at : at + step] for at in range(0, len(text), step))


@dataclass(slots=True, eq=False)
class Wish:
    """What is to be folded.

    Attributes:
        message_id: the last turn that the summary stands for.
        before: the fold that stands for turns before `turns`, if one does.
        limit: the context of who writes it, in tokens.
        digest: `digest_of` all that it stands for, as it is now.
        remote: another server's model, which answers this chat.
        then: what to do once it is folded.
    """

    chat: str
    message_id: str
    turns: Sequence[Message]
    before: Fold | None
    limit: int
    digest: str
    remote: RemoteModel | None = None
    then: Callable[[], object] | None = None
    summary: str = ""
    model: str = ""
    pieces: list[str] = field(default_factory=list)
    number: int = 0
    read: float = 0.0
    written: str = ""
    tokens: int = 0

    @property
    def share(self) -> float:
        writing = min(self.tokens / summary_tokens(self.limit), 1.0) if self.tokens else 0.0
        now = _READING_SHARE * (1.0 if self.tokens else self.read) + (1 - _READING_SHARE) * writing
        return min((self.number + now) / max(len(self.pieces), 1), 1.0)


class Folding(QObject):
    """Writes one summary at a time.  An answer comes first: it takes a summary's place, which begins its piece again.

    Args:
        count: the tokens of a text, about.

    Signals:
        changed: a wish has come, gone, or got on.
        folded(Wish): its summary is written.
        failed(Wish, str): it is not, and why, in one sentence.
    """

    changed = Signal()
    folded = Signal(object)
    failed = Signal(object, str)

    def __init__(
        self, client: EngineClient, answers: AnswerQueue, count: Callable[[str], int], parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._client, self._answers, self._count = client, answers, count
        self._wishes: deque[Wish] = deque()
        self._request: ChatAnswer | None = None
        answers.changed.connect(self._look)
        answers.phase_changed.connect(self._look)
        client.state_changed.connect(self._look)
        client.model_loaded.connect(self._look)

    def of(self, chat: str) -> Wish | None:
        return next((wish for wish in self._wishes if wish.chat == chat), None)

    def is_writing(self, wish: Wish) -> bool:
        return self._request is not None and wish is self._wishes[0]

    def ask(self, wish: Wish) -> None:
        self.cancel(wish.chat)
        room = max(wish.limit - 2 * summary_tokens(wish.limit) - _SPARE_TOKENS, _LEAST_PIECE)
        wish.summary = wish.before.summary if wish.before is not None else ""
        wish.pieces = pieces_of(wish.turns, round(0.85 * room), self._count)
        self._wishes.append(wish)
        if not wish.pieces:
            self._end(wish)
        self.changed.emit()
        self._look()

    def cancel(self, chat: str) -> None:
        wish = self.of(chat)
        if wish is not None:
            if self.is_writing(wish):
                self._drop_request()
            self._wishes.remove(wish)
            self.changed.emit()
            self._look()

    def close(self) -> None:
        self._drop_request()
        self._wishes.clear()

    # --- one piece after the other ---

    def _look(self, *_: object) -> None:
        if not self._wishes or self._is_beginning:
            return
        wish = self._wishes[0]
        if self._request is not None:
            if not self._answers.is_idle:
                self._drop_request()
                self.changed.emit()
        elif self._answers.is_idle and self._can_write(wish):
            self._begin(wish)

    def _can_write(self, wish: Wish) -> bool:
        if wish.remote is not None:
            return self._client.state not in (EngineState.DIED, EngineState.STOPPED)
        return self._client.takes_chats and self._client.model is not None

    def _begin(self, wish: Wish) -> None:
        so_far = f"{_SO_FAR}\n{wish.summary}\n\n" if wish.summary else ""
        instruction, cue = (words.format(summary_tokens(wish.limit) * 5 // 8) for words in (_INSTRUCTION, _CUE))
        text = f"{instruction}\n\n---\n\n{so_far}{wish.pieces[wish.number]}\n\n---\n\n{cue}"
        wish.written, wish.tokens, wish.read = "", 0, 0.0
        self._is_beginning = True  # the engine's state changes, which is looked at
        request = self._client.generate([ChatMessage("user", text)], self._sampling(wish), wish.remote)
        self._request, self._is_beginning = request, False
        request.progress.connect(self._on_read)
        request.token.connect(self._on_token)
        request.finished.connect(self._on_finished)
        self.changed.emit()

    _is_beginning = False

    def _sampling(self, wish: Wish) -> SamplingParams:
        most = summary_tokens(wish.limit)
        if wish.remote is not None:
            wish.model = f"{wish.remote.model} ({wish.remote.endpoint.name})".strip()
            return SamplingParams(temperature=0.3, max_tokens=max(most, min(THINKING_TOKENS, wish.limit // 4)))
        model = self._client.model
        own = own_sampling(model)
        wish.model = model.name if model is not None else ""
        if model is not None and "off" in model.thinking:
            return replace(own, max_tokens=most, thinking="off")
        return replace(own, max_tokens=most if model is None or not model.thinks else 2 * most)

    def _is_ours(self, request_id: str) -> bool:
        return self._request is not None and self._request.id == request_id

    def _on_read(self, progress: Progress) -> None:
        if self._is_ours(progress.request_id) and progress.total > 0:
            self._wishes[0].read = min(progress.done / progress.total, 1.0)
            self.changed.emit()

    def _on_token(self, token: Token) -> None:
        if self._is_ours(token.request_id):
            wish = self._wishes[0]
            wish.written += token.text
            wish.tokens = token.generated_tokens
            self.changed.emit()

    def _on_finished(self, event: Finished | Failed) -> None:
        if not self._is_ours(event.request_id):
            return  # it was given up
        self._request = None
        wish = self._wishes[0]
        if isinstance(event, Failed):
            self._fail(wish, event.message)
        elif not wish.written.strip():
            why = translate("Chat", "The model wrote no summary: leave the oldest turns out, or try another model.")
            self._fail(wish, why)
        else:
            wish.summary, wish.number = wish.written.strip(), wish.number + 1
            if wish.number == len(wish.pieces):
                self._end(wish)
        self.changed.emit()
        self._look()

    def _end(self, wish: Wish) -> None:
        self._wishes.remove(wish)
        self.folded.emit(wish)

    def _fail(self, wish: Wish, why: str) -> None:
        self._wishes.remove(wish)
        self.failed.emit(wish, why)

    def _drop_request(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.cancel()
