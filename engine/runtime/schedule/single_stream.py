"""A single stream: one sequence at a time over the model's own cache, where pages do not hold what that does.

That is so of encoder-decoders, of layers that keep what pages do not know or come from disk, and on cards.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from engine.common.chat import FinishReason
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.devices.failures import is_out_of_memory
from engine.jobs.rows import Check
from engine.runtime.decode.beam_search import over
from engine.runtime.decode.encoder_decoder_session import EncoderDecoderSession
from engine.runtime.decode.generation import (
    Decoded,
    GenerationResult,
    TextCallback,
    ignore_progress,
)
from engine.runtime.decode.kv_session import KvSession
from engine.runtime.decode.sequence import AnswerSequence, of_one
from engine.runtime.decode.speculation import GuessedSteps, StepPrices
from engine.runtime.kept.prefixes import KeptPrefixes, Reused
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import PreparedRow
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER, seconds_ns

_Session = KvSession | EncoderDecoderSession

NOTHING_CAME = GenerationResult()
"""The outcome of what was cancelled before anything was read."""


class SingleStream:
    """One sequence at a time over a cache of its own, whose tokens the next one goes on from.

    An answer goes on where it was whenever it is its turn.

    Args:
        speculates: whether coming tokens may be guessed and tried together; `None` is what the model was loaded for.
        kept: what earlier answers left; `None` reads each prompt that the last answer does not share.
    """

    def __init__(
        self, loaded: LoadedModel, *, speculates: bool | None = None, kept: KeptPrefixes | None = None
    ) -> None:
        self._loaded = loaded
        self._speculates = loaded.speculates if speculates is None else speculates
        self._prices = StepPrices()
        self._session: _Session
        if getattr(loaded.model.config, "is_encoder_decoder", False):
            self._session = EncoderDecoderSession(loaded)
        else:
            self._session = KvSession(loaded, guesses=self._speculates, kept=kept)

    @property
    def kv_tokens(self) -> int:
        """Tokens now held in the KV cache."""
        return self._session.tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes now held by the KV cache, spare capacity included."""
        return self._session.bytes

    def keep(self) -> None:
        """Lets others find what the last answer left; nothing is copied now."""
        if isinstance(self._session, KvSession):
            self._session.keep()

    def clear(self) -> None:
        """Frees the KV cache; the next prompt is read from its beginning, or from what is kept of it."""
        self._session.clear()

    def begin(self, asked: PreparedRow, begun: AnswerSequence | None = None) -> None:
        """The next `turn` begins the answer to a request; no other may be under way.

        Args:
            begun: the answer, if some of it is there; what was read for it is read again.
        """
        self._asked, self._answer = asked, begun
        self._guesses: GuessedSteps | None = None
        request, session = asked.request, self._session
        if isinstance(session, KvSession):
            session.chat = request.chat
        if begun is None:
            self._reading = session.read(
                asked.prompt, request.on_progress, request.cancelled, request.on_reused, repeats=request.repeats
            )
        else:
            self._reading = session.read([*asked.prompt, *begun.ids[:-1]], ignore_progress, request.cancelled)
        self._writing: Generator[None, None, Decoded] | None = None
        self._reused = Reused()
        self._request: int | None = None
        """Number of the recorded request; 0 if nothing was recorded when it began."""

    def turn(self, until: Check) -> GenerationResult | None:
        """Goes on until `until()` comes true, which is asked after each part of the prompt and each token.

        Returns:
            The outcome once there is one.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`; it is over then.
        """
        try:
            self._record()
            with torch.inference_mode(), self._given_up():
                done = self._go_on(until)
        except RequestCancelled:
            return self._cancelled()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._session.clear()
            raise EngineError(
                ErrorCode.NOT_ENOUGH_MEMORY,
                f"There is not enough memory for a context of {len(self._asked.prompt):,} prompt tokens: shorten the "
                f"conversation, close other programs or choose a smaller model.",
            ) from error
        finally:
            RECORDER.end_request()
        return self._result(done) if done is not None else None

    def _given_up(self) -> AbstractContextManager[None]:
        """While layers come from disk, a step may take so long that nobody wants to wait for its end."""
        stream = self._loaded.stream
        return stream.until(self._asked.request.cancelled) if stream is not None else nullcontext()

    def _cancelled(self) -> GenerationResult:
        """What there is, if it is given up while something is read."""
        result, answer = replace(NOTHING_CAME, prompt_tokens=len(self._asked.prompt)), self._answer
        if answer is None:
            return result
        with of_one():
            answer.end("cancelled")
        ids = tuple(answer.ids)
        return replace(result, text=answer.text, generated_tokens=len(ids), token_ids=ids)

    def _record(self) -> None:
        begins, self._request = self._request is None, self._request or 0
        if begins and RECORDER.on:
            RECORDER.begin_request(seconds_ns(self._asked.begun_s))
            RECORDER.phase(lanes.PROMPT, 0)
            self._request = RECORDER.request
        elif self._request:
            RECORDER.resume_request(self._request)

    def _go_on(self, until: Check) -> Decoded | None:
        while self._writing is None:
            try:
                next(self._reading)
            except StopIteration as end:
                logits, self._reused = end.value
                self._writing = self._written(logits if self._answer is None else None)
                break
            if until():
                return None
        with self._loaded.token_by_token() if self._asked.request.sampling.beams == 1 else nullcontext():
            while True:
                try:
                    next(self._writing)
                except StopIteration as end:
                    done: Decoded = end.value
                    if self._guesses is not None:
                        self._guesses.settle()
                    return done
                if until():
                    return None

    def _written(self, logits: torch.Tensor | None) -> Generator[None, None, Decoded]:
        asked, session, answer = self._asked, self._session, self._answer
        request, prefix = asked.request, session.answer_prefix(asked.prompt)
        if logits is not None and request.sampling.beams > 1:
            return over(session.beams(request.sampling.beams), asked.search(logits, prefix), logits.device)
        steps: _Session | GuessedSteps = session
        with of_one():
            if self._guesses is not None:
                steps = self._guesses
            elif (guessed := self._may_guess(session)) is not None:
                said = [*prefix, *answer.ids[:-1]] if answer is not None else prefix
                steps = self._guesses = GuessedSteps(guessed, self._prices, said, asked.limits.max_tokens)
            if answer is None:
                assert logits is not None
                answer = self._answer = asked.begin(prefix, logits.device)
        return decode(logits, steps, answer, request.on_text, request.cancelled)

    def _may_guess(self, session: _Session) -> KvSession | None:
        """Where coming tokens are tried, if they may be guessed."""
        if not self._speculates or not isinstance(session, KvSession):
            return None
        # Guesses of a draft head depend on the time they take, and change rounding.
        return None if self._asked.request.repeats and session.drafters() else session

    @property
    def begun(self) -> AnswerSequence | None:
        """The answer, if some of it is there and it can go on elsewhere."""
        return self._answer if self._answer is not None and self._answer.ids else None

    def set_aside(self) -> AnswerSequence | None:
        """What there is of the answer, for `begin`; None if it has to be begun again."""
        answer = self._answer
        if answer is None or not answer.ids or not isinstance(self._session, KvSession):
            return None
        if self._guesses is not None:
            self._guesses.settle()
        return answer

    def _result(self, done: Decoded) -> GenerationResult:
        if self._loaded.foresight is not None:
            self._loaded.foresight.learn_while_idle()
        guesses, session = self._guesses.speculation if self._guesses is not None else None, self._session
        return GenerationResult(
            text=done.text,
            finish_reason=done.reason,
            prompt_tokens=len(self._asked.prompt),
            reused_tokens=self._reused.tokens,
            generated_tokens=len(done.ids),
            token_ids=tuple(done.ids),
            stopped_by=done.stopped_by,
            from_ram=self._reused.ram,
            from_disk=self._reused.disk,
            **(session.layout.told if isinstance(session, KvSession) and session.layout is not None else {}),
            guessed_tokens=guesses.guessed if guesses is not None else 0,
            accepted_tokens=guesses.accepted if guesses is not None else 0,
        )


def decode(
    logits: torch.Tensor | None,
    session: _Session | GuessedSteps,
    answer: AnswerSequence,
    on_text: TextCallback,
    cancelled: CancelCheck,
) -> Generator[None, None, Decoded]:
    """One token at a time, with a pause after each.

    Args:
        logits: [1, V] after the prompt, or `None` if the answer has tokens, the last of which has not been read.

    Raises:
        SequenceError: what went wrong was not the model's step.
    """
    reason: FinishReason | None = None
    if logits is None:
        if cancelled():  # before it came here
            with of_one():
                text, reason = answer.end("cancelled")
                on_text(text, len(answer.ids))
            return Decoded(answer.ids, answer.text, reason, answer.stopped_by)
        logits = session.step(torch.tensor([answer.ids[-1:]]), answer.ids[-1])
    of_step = 0
    while True:
        with of_one():
            token = answer.choose(logits)
            token_id = int(token)
        of_step += 1
        # A step lasts until a token is chosen that was not tried with it.
        if RECORDER.on and not session.foresaw(token_id):
            RECORDER.phase(lanes.DECODE if len(answer.ids) >= of_step else lanes.SAMPLE, of_step)
            of_step = 0
        with of_one():
            text, reason = answer.take(token_id)
            on_text(text, len(answer.ids))
            if reason is None and cancelled():
                text, reason = answer.end("cancelled")
                on_text(text, len(answer.ids))
        if reason is not None:
            break
        yield
        logits = session.step(token, token_id)
    if RECORDER.on and of_step:
        RECORDER.phase(lanes.DECODE, of_step)
    return Decoded(answer.ids, answer.text, reason, answer.stopped_by)
