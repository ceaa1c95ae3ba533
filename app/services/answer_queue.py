"""Sends prompts to the engine: waits for the model, collects answers, and saves them as they grow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Protocol

from PySide6.QtCore import QObject, Signal

from app.services.background import timer
from app.services.chat_store import AnswerStats, Attachment, ChatStore, Fold, Message, MessageState
from app.services.chat_store.records import clean_text
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import ChatAnswer
from app.services.kept import THINKING_TOKENS, own_sampling
from engine.common.chat import Picture, Role, Tool, ToolCall, parts_with
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.protocol import Called, ChatMessage, Failed, Finished, Progress, Token
from engine.remote.endpoint import RemoteModel
from engine.tools.rounds import (
    DENIED,
    CallState,
    OfferedTool,
    Outcome,
    ToolUse,
    begin_round,
    find_tool,
    step_turns,
    turns_after,
)

SHOW_MS = 40
"""Interval of text updates to the window: faster than people read, and far fewer events than tokens."""

SAVE_S = 0.4
"""Interval of saving a growing answer: the most that a crash can lose."""

CANCELLED = "cancelled"


class Stage(Enum):
    LOOKING_UP = "looking into documents"
    STARTING_TOOLS = "starting tools"
    ALLOWING = "waiting to be allowed to call a tool"
    CALLING = "waiting for a tool"
    NO_ENGINE = "no engine"
    NO_MODEL = "no model"
    LOADING = "loading"
    QUEUED = "queued"
    READING = "reading"
    ASKING = "asking another server"
    THINKING = "thinking"
    WRITING = "writing"


@dataclass(frozen=True, slots=True)
class Phase:
    stage: Stage
    fraction: float | None = None
    tokens_per_s: float = 0.0


class ToolRunner(Protocol):
    @property
    def always_allowed(self) -> tuple[str, ...]: ...

    def run(
        self,
        offered: OfferedTool,
        arguments: str,
        attachments: Sequence[Attachment],
        done: Callable[[Outcome], object],
    ) -> Callable[[], None]: ...


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of a chat."""

    runner: ToolRunner
    offered: tuple[OfferedTool, ...]
    in_chat: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(each.tool for each in self.offered)


@dataclass(slots=True)
class _Turn:
    answer: Message
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams | None
    remote: RemoteModel | None = None
    offer: ToolOffer | None = None
    request: ChatAnswer | None = None
    calls: tuple[ToolCall, ...] = ()
    stops: dict[str, Callable[[], None]] = field(default_factory=dict)
    stats: AnswerStats | None = None
    unshown: bool = False
    unsaved: bool = False
    saved_at: float = 0.0
    cancelling: bool = False
    tokens: int = 0
    first_at: float = 0.0
    first_tokens: int = 0

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.offer.tools if self.offer is not None else ()

    @property
    def uses(self) -> tuple[ToolUse, ...]:
        return self.answer.steps[-1].calls if self.answer.steps else ()


UNSEEN = "[a picture]"
"""What a model that reads text only gets of a message without any."""
UNREAD = "[a document that could not be read]"
NOT_SENT = "[not in this excerpt]"
"""Stands for the question where the first turn that is sent is an answer, which most chat templates refuse."""
_SUMMARY = "Earlier in this conversation, in short:"


def instructions_with(system_prompt: str, fold: Fold | None) -> str:
    summary = f"{_SUMMARY}\n\n{fold.summary.strip()}" if fold is not None and fold.summary.strip() else ""
    return "\n\n".join(filter(None, (system_prompt.strip() and system_prompt, summary)))


def prompt_of(
    system_prompt: str,
    lineage: Iterable[Message],
    *,
    sees: bool = False,
    given: Mapping[str, str] | None = None,
    calls: bool = False,
) -> tuple[ChatMessage, ...]:
    """The messages to send: empty answers are left out, and consecutive turns of one role are merged.

    What was thought goes along: which of it the model reads again, its chat template decides.

    Args:
        sees: the model reads pictures; else they are left out.
        given: by the ids of messages, what is given to read before them, of documents.
        calls: earlier calls of tools and their results are sent, too.
    """
    turns: list[tuple[Role, str, str, tuple[Picture, ...]]] = []
    calling: dict[int, tuple[ChatMessage, ...]] = {}
    if system_prompt.strip():
        turns.append(("system", system_prompt, "", ()))
    for message in lineage:
        if calls and (ended := [step for step in message.steps if step.calls]):
            if not any(role == "user" for role, *_ in turns):
                turns.append(("user", NOT_SENT, "", ()))
            calling[len(turns)] = tuple(each for step in ended for each in step_turns(step))
            turns.append(("assistant", message.content, message.reasoning, ()))
            continue
        if message.steps:
            told = [*(step.text for step in message.steps), message.content]
            message = replace(message, content="\n\n".join(filter(None, told)))
        content, pictures = message.content, message.pictures if sees else ()
        if not content.strip() and message.pictures and not sees:
            content = UNSEEN
        if not content.strip() and message.attachments and message.id not in (given or {}):
            content = UNREAD
        content = "\n\n".join(filter(None, ((given or {}).get(message.id, ""), content)))
        if not content.strip() and not pictures:
            continue
        if turns and turns[-1][0] == message.role:
            _, before, thought, shown = turns.pop()
            content = "\n\n".join(filter(None, (before, content)))
            reasoning = "\n\n".join(filter(None, (thought, message.reasoning)))
            turns.append((message.role, content, reasoning, (*shown, *pictures)))
        else:
            if message.role == "assistant" and not any(role == "user" for role, *_ in turns):
                turns.append(("user", NOT_SENT, "", ()))
            turns.append((message.role, content, message.reasoning, pictures))
    found: list[ChatMessage] = []
    for number, (role, content, reasoning, pictures) in enumerate(turns):
        found += calling.get(number, ())
        if content.strip() or pictures:
            found.append(ChatMessage(role, content, reasoning, parts=parts_with(content, pictures)))
    return tuple(found)


def sent_text(message: Message, *, calls: bool) -> str:
    """All that `prompt_of` sends of a message, pictures and documents excepted, to be counted."""
    parts = []
    for step in message.steps:
        parts.append(step.text)
        if calls:
            parts += [part for use in step.calls for part in (use.name, use.arguments, use.result)]
    return "\n\n".join(filter(None, (*parts, message.content)))


class AnswerQueue(QObject):
    """Requests answers.  Each of them ends as complete, partial or failed, and is saved as such.

    Signals:
        changed: the answer (a `Message`) that has grown or ended, with its full text so far.
        phase_changed: id of an answer, and its `Phase`.
        model_wanted: an answer is to come from the model on this PC.
    """

    changed = Signal(object)
    phase_changed = Signal(str, object)
    model_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        store: ChatStore,
        parent: QObject | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(parent)
        self._client = client
        self._store = store
        self._clock = clock
        self._waiting: deque[_Turn] = deque()
        self._running: dict[str, _Turn] = {}
        self._held: dict[str, Message] = {}
        self._calling: dict[str, _Turn] = {}
        """By the ids of answers: those that wait for tools, or to be allowed to call one."""
        self._phases: dict[str, Phase] = {}
        self._pace = timer(self, self._emit_texts, SHOW_MS)
        client.state_changed.connect(self._start_waiting)
        client.model_loaded.connect(self._start_waiting)
        client.loading_changed.connect(self._report_waiting)

    def hold(self, answer: Message, stage: Stage = Stage.LOOKING_UP) -> None:
        """An answer whose prompt is still being put together: `ask` follows, unless it is stopped before."""
        self._held[answer.id] = answer
        self._set_phase(_Turn(answer, (), None), Phase(stage))

    def is_held(self, message_id: str) -> bool:
        return message_id in self._held

    def ask(
        self,
        answer: Message,
        messages: tuple[ChatMessage, ...],
        sampling: SamplingParams | None,
        remote: RemoteModel | None = None,
        offer: ToolOffer | None = None,
    ) -> None:
        """Answer `messages`.  `answer` is the empty message to fill; it is already in the store.

        Args:
            sampling: None is the own sampling of the model that answers.
            remote: another server's model answers, and no other.
            offer: tools that it may call.
        """
        self._held.pop(answer.id, None)
        self._waiting.append(_Turn(answer, messages, sampling, remote, offer))
        if remote is None:
            self.model_wanted.emit()
        self._start_waiting()

    def refuse(self, answer: Message, reason: str) -> None:
        """Ends an answer that nobody can be asked for."""
        self._end(_Turn(answer, (), None), MessageState.FAILED, reason, ErrorCode.ENDPOINT_FAILED.value, None)

    def stop(self, message_id: str) -> None:
        if message_id in self._held:
            self._end(_Turn(self._held.pop(message_id), (), None), MessageState.PARTIAL, "", CANCELLED, None)
            return
        if (calling := self._calling.pop(message_id, None)) is not None:
            for stop in calling.stops.values():
                stop()
            self._end(calling, MessageState.PARTIAL, "", CANCELLED, calling.stats)
            return
        for turn in list(self._running.values()):
            if turn.answer.id == message_id:
                turn.cancelling = True
                if turn.request is not None:
                    turn.request.cancel()
                return
        for turn in self._waiting:
            if turn.answer.id == message_id:
                self._waiting.remove(turn)
                self._end(turn, MessageState.PARTIAL, "", CANCELLED, None)
                self._report_waiting()
                return

    def stop_all(self, message_ids: Iterable[str]) -> None:
        for message_id in list(message_ids):
            self.stop(message_id)

    def phase(self, message_id: str) -> Phase | None:
        return self._phases.get(message_id)

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting and not self._held and not self._calling

    # --- starting ---

    def _start_waiting(self) -> None:
        if self._client.state not in (EngineState.DIED, EngineState.STOPPED):
            for there in [turn for turn in self._waiting if turn.remote is not None]:
                self._waiting.remove(there)
                self._start_elsewhere(there)
        # Its other work (loading, tuning) comes first; answers are written together.
        while (turn := self._first_here()) and self._client.takes_chats and (model := self._client.model) is not None:
            self._waiting.remove(turn)
            turn.answer = replace(turn.answer, model=model.name)
            sampling, chat = turn.sampling or own_sampling(model), turn.answer.conversation_id
            kept_for = "" if self._store.leaves_out(chat) else chat
            self._follow(turn, self._client.generate(turn.messages, sampling, chat=kept_for, tools=turn.tools))
            self._set_phase(turn, Phase(Stage.READING))
        self._report_waiting()

    def _first_here(self) -> _Turn | None:
        return next((turn for turn in self._waiting if turn.remote is None), None)

    def _start_elsewhere(self, turn: _Turn) -> None:
        assert turn.remote is not None
        remote = turn.remote
        turn.answer = replace(turn.answer, model=f"{remote.model} ({remote.endpoint.name})".strip())
        sampling = turn.sampling
        if sampling is None:  # the server knows its model's own
            remote = replace(remote, chosen=("max_tokens",))
            sampling = SamplingParams(max_tokens=THINKING_TOKENS)
        self._follow(turn, self._client.generate(turn.messages, sampling, remote, tools=turn.tools))
        self._set_phase(turn, Phase(Stage.ASKING))

    def _follow(self, turn: _Turn, request: ChatAnswer) -> None:
        turn.request = request
        self._running[request.id] = turn
        request.progress.connect(self._on_reading)
        request.token.connect(self._on_token)
        request.called.connect(self._on_called)
        request.finished.connect(self._on_finished)

    def _report_waiting(self) -> None:
        phase = self._waiting_phase()
        for turn in self._waiting:
            self._set_phase(turn, phase)

    def _waiting_phase(self) -> Phase:
        state = self._client.state
        if state in (EngineState.DIED, EngineState.STOPPED):
            return Phase(Stage.NO_ENGINE)
        if state in (EngineState.STARTING, EngineState.LOADING):
            return Phase(Stage.LOADING, self._client.loading)
        return Phase(Stage.NO_MODEL) if self._client.model is None else Phase(Stage.QUEUED)

    def _set_phase(self, turn: _Turn, phase: Phase) -> None:
        if self._phases.get(turn.answer.id) != phase:
            self._phases[turn.answer.id] = phase
            self.phase_changed.emit(turn.answer.id, phase)

    # --- streaming ---

    def _on_reading(self, progress: Progress) -> None:
        turn = self._running.get(progress.request_id)
        if turn is not None:
            fraction = min(progress.done / progress.total, 1.0) if progress.total > 0 else None
            self._set_phase(turn, Phase(Stage.READING, fraction))

    def _on_token(self, token: Token) -> None:
        turn = self._running.get(token.request_id)
        if turn is None:
            return
        if not turn.first_at:
            turn.first_at = turn.saved_at = self._clock()
            turn.first_tokens = token.generated_tokens
        turn.tokens, turn.unshown = token.generated_tokens, True
        answer = turn.answer
        if token.reasoning:
            answer = replace(answer, reasoning=answer.reasoning + token.reasoning)
        if answer.reasoning and not answer.content:  # until the answer begins, or ends without having begun
            answer = replace(answer, reasoning_s=self._clock() - turn.first_at)
        if token.text:
            answer = replace(answer, content=answer.content + token.text)
        turn.unsaved = turn.unsaved or bool(token.text or token.reasoning)
        turn.answer = answer
        if not self._pace.isActive():
            self._pace.start()
            self._emit_texts()
        elif turn.tokens == turn.first_tokens:
            self._emit_text(turn, self._clock())  # the first at once

    def _emit_texts(self) -> None:
        """Emits new text since the last time, and saves it now and then; stops when nothing is left to do."""
        now = self._clock()
        for turn in list(self._running.values()):
            self._emit_text(turn, now)
        if not any(turn.unsaved for turn in self._running.values()):
            self._pace.stop()

    def _emit_text(self, turn: _Turn, now: float) -> None:
        if turn.unshown:
            turn.unshown = False
            self.changed.emit(turn.answer)
            elapsed = now - turn.first_at
            rate = (turn.tokens - turn.first_tokens) / elapsed if elapsed > 0.25 else 0.0
            stage = Stage.THINKING if turn.answer.reasoning and not turn.answer.content else Stage.WRITING
            self._set_phase(turn, Phase(stage, tokens_per_s=round(rate, 1)))
        if turn.unsaved and now - turn.saved_at >= SAVE_S:
            turn.unsaved, turn.saved_at = False, now
            self._store.save_step(turn.answer)

    # --- the end ---

    def _on_finished(self, event: Finished | Failed) -> None:
        turn = self._running.pop(event.request_id, None)
        if turn is None:
            return
        if not self._running:
            self._pace.stop()
        if isinstance(event, Finished):
            stats = AnswerStats(**{each.name: getattr(event, each.name) for each in fields(AnswerStats)})
            if event.finish_reason == "cancelled":
                self._end(turn, MessageState.PARTIAL, "", CANCELLED, stats)
            elif turn.calls:
                self._begin_calls(turn, stats)
            else:
                self._end(turn, MessageState.COMPLETE, "", "", stats)
        elif turn.cancelling and event.code is not ErrorCode.ENGINE_DIED:
            self._end(turn, MessageState.PARTIAL, "", CANCELLED, None)
        else:
            came = turn.answer.content or turn.answer.reasoning
            state = MessageState.PARTIAL if came else MessageState.FAILED
            self._end(turn, state, event.message, event.code.value, None)
        self._start_waiting()

    # --- tools ---

    def decide(self, message_id: str, call_id: str, *, allowed: bool) -> None:
        turn = self._calling.get(message_id)
        if turn is None or not any(use.id == call_id and use.state == "asked" for use in turn.uses):
            return
        if allowed:
            self._run(turn, call_id)
        else:
            self._put(turn, call_id, state="denied", result=DENIED)
            self._go_on(turn)

    def allow_in_chat(self, message_id: str, key: str) -> None:
        turn = self._calling.get(message_id)
        if turn is not None and turn.offer is not None:
            turn.offer = replace(turn.offer, in_chat=(*turn.offer.in_chat, key))

    def waiting_calls(self, message_id: str) -> tuple[str, ...]:
        turn = self._calling.get(message_id)
        return tuple(use.id for use in turn.uses if use.state == "asked") if turn is not None else ()

    def _on_called(self, event: Called) -> None:
        turn = self._running.get(event.request_id)
        if turn is not None and turn.offer is not None:
            turn.calls = event.calls

    def _begin_calls(self, turn: _Turn, stats: AnswerStats) -> None:
        assert turn.offer is not None
        calls, turn.calls, turn.stats = turn.calls, (), stats
        answer, offer = turn.answer, turn.offer
        begun = begin_round(answer.steps, answer.content, answer.reasoning, calls, offer.offered)
        turn.answer = replace(answer, content="", reasoning="", steps=(*answer.steps, begun.step))
        turn.first_at, turn.unsaved = 0.0, False
        turn.offer = None if begun.is_last else offer
        self._calling[answer.id] = turn
        self._store.save_step(turn.answer)
        self._store.set_steps(turn.answer)
        for use in begun.step.calls:
            offered = find_tool(offer.offered, use.name)
            allowed = (*offer.runner.always_allowed, *offer.in_chat)
            if use.state == "asked" and offered is not None and offered.may_run(allowed):
                self._run(turn, use.id)
        self._go_on(turn)

    def _run(self, turn: _Turn, call_id: str) -> None:
        assert turn.offer is not None
        use = next(each for each in turn.uses if each.id == call_id)
        offered = find_tool(turn.offer.offered, use.name)
        assert offered is not None
        begun = self._clock()

        def done(outcome: Outcome) -> None:
            turn.stops.pop(call_id, None)
            if self._calling.get(turn.answer.id) is turn:
                took = self._clock() - begun
                state: CallState = "failed" if outcome.failed else "done"
                self._put(turn, call_id, state=state, result=clean_text(outcome.text), seconds=took)
                self._go_on(turn)

        self._put(turn, call_id, state="running")
        stop = turn.offer.runner.run(offered, use.arguments, turn.offer.attachments, done)
        if any(each.id == call_id and each.state == "running" for each in turn.uses):
            turn.stops[call_id] = stop

    def _put(self, turn: _Turn, call_id: str, **changes: Any) -> None:
        *before, step = turn.answer.steps
        step = step.with_use(call_id, lambda use: replace(use, **changes))
        turn.answer = replace(turn.answer, steps=(*before, step))

    def _go_on(self, turn: _Turn) -> None:
        if self._calling.get(turn.answer.id) is not turn:
            return
        states = {use.state for use in turn.uses}
        self._store.set_steps(turn.answer)
        self.changed.emit(turn.answer)
        if "asked" in states or "running" in states:
            self._set_phase(turn, Phase(Stage.ALLOWING if "asked" in states else Stage.CALLING))
            return
        del self._calling[turn.answer.id]
        turn.messages = (*turn.messages, *turns_after(turn.answer.steps, is_last=turn.offer is None))
        turn.request, turn.tokens, turn.first_tokens = None, 0, 0
        self._waiting.append(turn)
        if turn.remote is None:
            self.model_wanted.emit()
        self._start_waiting()

    def _end(self, turn: _Turn, state: MessageState, reason: str, reason_code: str, stats: AnswerStats | None) -> None:
        self._phases.pop(turn.answer.id, None)
        turn.answer = replace(turn.answer, state=state, reason=reason, reason_code=reason_code, stats=stats)
        self._store.update_message(turn.answer)
        self.changed.emit(turn.answer)
