"""A job's rows, asked of several endpoints at once, and of this machine as one of them.

At least once asked, exactly once answered: a row whose answer is lost is asked again elsewhere, and a second answer is
dropped.  Each request waits on a thread of its own; what to do is decided on the job's (`engine.remote.spread`).

An answer counts only if it is what was asked for: servers promise to keep to a schema, and some do not.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from engine.batch_files.job_watcher import PlacePace
from engine.batch_files.rows import Constraint, RowRequest, grammar_of
from engine.common.chat import calls_as_json
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.jobs.rows import BatchOutcome, Check, ClosingExecutor, RowAnswer, RowCallback
from engine.protocol import Token
from engine.remote.chat_form import RemoteAnswer, RemoteRequest
from engine.remote.client import Client
from engine.remote.failures import RemoteError
from engine.remote.spread import MOST_AT_ONCE, Place, Spread, Turn

_FENCED = re.compile(r"```[a-z]*\n(.*)\n```", re.DOTALL)


class AnswerCheck:
    """Checks many answers; each constraint is compiled once."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._grammars: dict[Constraint, str] = {}

    def kept(self, constraint: Constraint, text: str) -> tuple[str, bool]:
        """The answer alone, and whether it satisfies its constraint."""
        text = text.strip()
        if constraint.choices:
            return text, text in constraint.choices
        fenced = _FENCED.fullmatch(text)
        for each in (text, fenced[1].strip()) if fenced else (text,):
            if self._satisfies(constraint, each):
                return each, True
        return text, False

    def _satisfies(self, constraint: Constraint, text: str) -> bool:
        from llguidance import LLMatcher, LLTokenizer

        if constraint not in self._grammars:
            self._grammars[constraint] = grammar_of(constraint, any_space=True)
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer("byte")  # the grammar is of text, whatever a server's tokens are
        matcher = LLMatcher(self._tokenizer, self._grammars[constraint], log_level=0)
        return bool(matcher.consume_tokens(list(text.encode("utf-8", "replace")))) and bool(matcher.is_accepting())


_LOOK_S = 0.1
_COUNT_S = 0.25
_HERE = ""
_KEPT = "The answers so far are kept: resume the job once that has changed."


@dataclass(frozen=True, slots=True)
class Server:
    """An endpoint that rows are asked of.

    Attributes:
        place: how it is asked.
        client: closed with the executor.
        model: the id of the model to ask; empty for the server's own choice.
    """

    place: Place
    client: Client
    model: str = ""


@dataclass(slots=True, eq=False)
class _Running:
    """A request on its way; `pieces` is written by its thread and read by the job's."""

    turn: Turn
    pieces: int = 0
    is_unwanted: bool = False


_Event = Callable[[RowCallback], None]


class SpreadRows:
    """A `RowExecutor` over endpoints.

    Args:
        servers: at least one, or `here`.
        here: this machine's own engine as one more place; closed with this.
        here_at_once: how many rows it takes at most.
        may_ask_twice: see `Spread`.
        patience_s: how long to wait while nobody answers; None: until somebody does, or the job is cancelled.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        here: ClosingExecutor | None = None,
        *,
        here_at_once: int = MOST_AT_ONCE,
        may_ask_twice: bool = False,
        patience_s: float | None = None,
    ) -> None:
        places = [server.place for server in servers]
        if here is not None:
            places.append(Place(_HERE, most_at_once=here_at_once, reads_all=False))
        self._spread = Spread(places, may_ask_twice=may_ask_twice)
        self._servers = {server.place.name: server for server in servers}
        self._patience_s = patience_s
        self._check = AnswerCheck()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._running: dict[Turn, _Running] = {}
        self._is_over = False
        self._counted_s = 0.0
        self._threads = {
            server.place.name: ThreadPoolExecutor(
                max_workers=(server.place.most_at_once or MOST_AT_ONCE) + 8, thread_name_prefix="remote-row"
            )
            for server in servers
        }
        self._here = _Here(here, self._events.put, self._from_here, self._here_failed) if here is not None else None

    # --- a RowExecutor ----------------------------------------------------------------------------

    @property
    def note(self) -> str:
        """How this machine's own rows were answered, if there is something to say."""
        return self._here.rows.note if self._here is not None else ""

    @property
    def under_way(self) -> tuple[int, int]:
        return self._spread.under_way

    @property
    def waits(self) -> str:
        return self._spread.waits(time.monotonic())

    @property
    def places(self) -> tuple[PlacePace, ...]:
        return self._spread.paces(time.monotonic())

    def run(
        self, rows: Iterator[RowRequest], on_row: RowCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        self._spread.is_read = False
        while True:
            self._take_events(on_row)
            if cancelled():
                self._stop()
                return BatchOutcome.CANCELLED
            if should_yield():
                return BatchOutcome.YIELDED
            self._read(rows)
            now = time.monotonic()
            while (turn := self._spread.next(now)) is not None:
                self._begin(turn)
            if self._spread.is_read and self._spread.is_empty:
                return BatchOutcome.FINISHED
            self._require_somebody(now)
            self._wait(now, on_row)

    def close(self) -> None:
        """Ends what is under way, within a second or so."""
        self._stop()
        for server in self._servers.values():
            server.client.close()
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        if self._here is not None:
            self._here.close()

    # --- the job's thread -------------------------------------------------------------------------

    def _read(self, rows: Iterator[RowRequest]) -> None:
        for _ in range(max(0, self._spread.wanted)):
            asked = next(rows, None)
            if asked is None:
                self._spread.is_read = True
                return
            self._spread.add(asked)

    def _begin(self, turn: Turn) -> None:
        if self._here is not None and turn.at == _HERE:
            self._here.give(turn)
            return
        running = self._running[turn] = _Running(turn)
        server = self._servers[turn.at]
        self._threads[turn.at].submit(self._ask, server, running)

    def _take_events(self, on_row: RowCallback) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            event(on_row)
        now = time.monotonic()
        if now - self._counted_s >= _COUNT_S:
            self._counted_s = now
            for turn, running in self._running.items():
                self._spread.came(turn, running.pieces, now)

    def _wait(self, now: float, on_row: RowCallback) -> None:
        moment = self._spread.moment(now)
        seconds = _LOOK_S if moment is None else min(_LOOK_S, max(0.001, moment - now))
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return
        event(on_row)

    def _require_somebody(self, now: float) -> None:
        """Raises when waiting is of no use, or has been long enough."""
        spread = self._spread
        if spread.under_way[0] or not spread.waits(now):
            return
        if spread.are_all_out:
            whys = " ".join(dict.fromkeys(place.why for place in spread.paces(now)))
            raise EngineError(ErrorCode.ENDPOINT_FAILED, f"{whys} {_KEPT}")
        if self._patience_s is not None and spread.stuck_s(now) >= self._patience_s:
            whys = " ".join(dict.fromkeys(place.why for place in spread.paces(now) if place.why))
            raise EngineError(
                ErrorCode.ENDPOINT_FAILED, f"Nobody answered for {self._patience_s:.0f} s. {whys} {_KEPT}"
            )

    def _answered(self, turn: Turn, answer: RowAnswer, on_row: RowCallback) -> None:
        now = time.monotonic()
        tokens = answer.prompt_tokens, answer.generated_tokens
        for other in self._spread.others_of(turn):
            if (running := self._running.get(other)) is not None:
                running.is_unwanted = True
        if self._spread.answered(turn, now, *tokens, failed=bool(answer.error)):
            on_row(answer)

    def _stop(self) -> None:
        self._is_over = True
        for running in self._running.values():
            running.is_unwanted = True
        if self._here is not None:
            self._here.stop()

    # --- endpoints --------------------------------------------------------------------------------

    def _ask(self, server: Server, running: _Running) -> None:
        """On a thread of the endpoint."""
        turn = running.turn

        def came(delta: Token) -> None:
            running.pieces = delta.generated_tokens

        def cancelled() -> bool:
            return running.is_unwanted

        row = turn.row
        request = RemoteRequest(
            row.messages, row.sampling, server.model, constraint=row.constraint, own_tools=row.tools
        )
        try:
            answer = server.client.ask(request, came, cancelled)
        except RemoteError as error:
            failure = error
            self._events.put(lambda on_row: self._failed(running, failure, on_row))
        except RequestCancelled:
            self._events.put(lambda _on_row: self._dropped(running))
        except BaseException as error:  # a fault of ours, which ends the job
            fault = error
            self._events.put(lambda _on_row: self._broke(running, fault))
        else:
            self._events.put(lambda on_row: self._came(running, answer, on_row))

    def _came(self, running: _Running, answer: RemoteAnswer, on_row: RowCallback) -> None:
        self._running.pop(running.turn, None)
        turn = running.turn
        text, is_complete = answer.text, True
        calls = calls_as_json(answer.tool_calls)
        if turn.row.constraint is not None and not calls:
            text, is_complete = self._check.kept(turn.row.constraint, text)
        generated = answer.pieces if answer.generated_tokens is None else answer.generated_tokens
        read = answer.prompt_tokens
        if read is None:  # about; the server does not count
            read = sum(len(message.content) for message in turn.row.messages) // 4
        finish = answer.finish_reason
        counts = finish, read, generated
        ended = RowAnswer(
            turn.row.row, text, *counts, answer.reasoning, is_complete=is_complete, by=turn.at, tool_calls=calls
        )
        self._answered(turn, ended, on_row)

    def _failed(self, running: _Running, error: RemoteError, on_row: RowCallback) -> None:
        turn = running.turn
        self._running.pop(turn, None)
        if running.is_unwanted:
            self._spread.dropped(turn)
            return
        now = time.monotonic()
        self._spread.came(turn, running.pieces, now)
        if self._spread.failed(turn, now, error.kind, error.message, error.retry_after_s):
            on_row(RowAnswer(turn.row.row, "", "failed", error=error.message, by=turn.at))

    def _dropped(self, running: _Running) -> None:
        self._running.pop(running.turn, None)
        self._spread.dropped(running.turn)

    def _broke(self, running: _Running, error: BaseException) -> None:
        self._dropped(running)
        raise error

    # --- this machine -----------------------------------------------------------------------------

    def _from_here(self, turn: Turn, answer: RowAnswer, on_row: RowCallback) -> None:
        if answer.finish_reason == "cancelled":
            self._spread.dropped(turn)
        else:
            self._answered(turn, answer, on_row)

    def _here_failed(self, error: BaseException) -> None:
        if not isinstance(error, EngineError):
            raise error
        self._spread.leave(_HERE, error.message)


class _Here:
    """This machine's own engine, which takes rows on a thread of its own.

    Args:
        post: takes what is to be done on the job's thread.
        answered, failed: told there.
    """

    def __init__(
        self,
        rows: ClosingExecutor,
        post: Callable[[_Event], None],
        answered: Callable[[Turn, RowAnswer, RowCallback], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.rows = rows
        self._post, self._answered, self._failed = post, answered, failed
        self._given: deque[Turn] = deque()
        self._taken: deque[Turn] = deque()
        self._turns: dict[int, Turn] = {}
        self._news = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="remote-row-here", daemon=True)
        self._thread.start()

    def give(self, turn: Turn) -> None:
        self._given.append(turn)
        self._news.set()

    def stop(self) -> None:
        self._is_over = True
        self._news.set()

    def close(self) -> None:
        self.stop()
        self._thread.join()
        self.rows.close()

    def _serve(self) -> None:
        try:
            while not self._is_over:
                self._news.wait()
                self._news.clear()
                outcome = BatchOutcome.YIELDED
                while outcome is BatchOutcome.YIELDED or self._given or self._taken:
                    # Rows that are there already are no reason to yield: they may not have been read yet.
                    while self._given:
                        self._taken.append(self._given.popleft())
                    outcome = self.rows.run(
                        self._rows(), self._has_answered, lambda: bool(self._given), lambda: self._is_over
                    )
                    if outcome is BatchOutcome.CANCELLED:
                        return
        except BaseException as error:
            failure = error
            self._post(lambda _on_row: self._failed(failure))

    def _rows(self) -> Iterator[RowRequest]:
        while self._taken:
            turn = self._taken.popleft()
            self._turns[turn.row.row] = turn
            yield turn.row

    def _has_answered(self, answer: RowAnswer) -> None:
        turn = self._turns.pop(answer.row)
        self._post(lambda on_row: self._answered(turn, answer, on_row))
