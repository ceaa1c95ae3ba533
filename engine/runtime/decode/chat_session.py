"""A loaded model that answers conversations, one request at a time; how fast it does so is timed the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch

from engine.common.chat import ChatMessage, FinishReason
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled, never_cancelled
from engine.devices.failures import is_out_of_memory
from engine.runtime.decode.beam_search import decode_beams
from engine.runtime.decode.encoder_decoder_session import EncoderDecoderSession, source_prompt
from engine.runtime.decode.generation import (
    ChanceLog,
    Decoded,
    GenerationResult,
    ProgressCallback,
    Session,
    TextCallback,
    TokenConstraint,
    ignore_progress,
    ignore_text,
)
from engine.runtime.decode.kv_session import KvSession
from engine.runtime.decode.prompt import chat_prompt, check_length, implied_stops
from engine.runtime.decode.sequence import AnswerLimits, AnswerSequence, end_token_ids
from engine.runtime.decode.speculation import Speculation, StepPrices
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER, seconds_ns
from engine.tuning.result import DecodeRate

TIMED_PROMPT = (
    "A railway switchyard sorts freight cars. Explain in plain words how the hump, the switches and the retarders work."
)
_FEWEST_TOKENS = 4


class ChatSession:
    """Answers conversations with one model, and keeps the KV of what it has read for the next turn.

    Args:
        speculates: whether coming tokens may be guessed and tried together; `None` is what the model was loaded for.
    """

    def __init__(self, loaded: LoadedModel, *, speculates: bool | None = None) -> None:
        self._loaded = loaded
        self._speculates = loaded.speculates if speculates is None else speculates
        self._prices = StepPrices()
        self._tokenizer = loaded.tokenizer
        self._encodes = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        self._session: Session = (
            EncoderDecoderSession(loaded) if self._encodes else KvSession(loaded, guesses=self._speculates)
        )
        self._end_ids = end_token_ids(loaded.model, loaded.tokenizer)
        self._implied_stops = () if self._encodes else implied_stops(loaded.tokenizer)

    @property
    def kv_tokens(self) -> int:
        """Tokens now held in the KV cache."""
        return self._session.tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes now held by the KV cache, spare capacity included."""
        return self._session.bytes

    def clear(self) -> None:
        """Frees the KV cache; the next prompt is read from its beginning."""
        self._session.clear()

    def prompt_ids(self, messages: Sequence[ChatMessage], cancelled: CancelCheck = never_cancelled) -> list[int]:
        """The tokens of a conversation, as `generate` reads them.

        Raises:
            EngineError: `INVALID_REQUEST`, or `MODEL_UNSUPPORTED` if the chat template or the tokenizer fails.
            RequestCancelled: `cancelled()` came true meanwhile.
        """
        if self._encodes:
            return source_prompt(self._tokenizer, messages, cancelled)
        return chat_prompt(self._tokenizer, messages, cancelled)

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        *,
        on_progress: ProgressCallback = ignore_progress,
        on_text: TextCallback = ignore_text,
        cancelled: CancelCheck = never_cancelled,
        constraint: TokenConstraint | None = None,
        chances: ChanceLog | None = None,
    ) -> GenerationResult:
        """Answers the conversation.  A cancelled request returns what it has, with finish reason `cancelled`.

        Args:
            constraint: what the answer must satisfy, unless it is searched for with beams; it knows of no token yet.
            chances: takes how likely each token was, unless the answer is searched for with beams.

        Raises:
            EngineError: `PROMPT_TOO_LONG`, `INVALID_REQUEST`, `MODEL_UNSUPPORTED` (its template) or
                `NOT_ENOUGH_MEMORY`.
        """
        begun = perf_counter()
        try:
            ids = self.prompt_ids(messages, cancelled)
            earlier = self._earlier(messages, ids, cancelled) if sampling.repetition_penalty != 1 else 0
        except RequestCancelled:
            return GenerationResult("", "cancelled", 0, 0, 0, 0.0, 0.0)
        return self._run(
            ids,
            earlier,
            sampling,
            (*sampling.stop, *self._implied_stops),
            self._end_ids,
            begun,
            on_progress,
            on_text,
            cancelled,
            constraint,
            chances,
        )

    def generate_from_ids(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        *,
        end_ids: frozenset[int] | None = None,
        on_progress: ProgressCallback = ignore_progress,
        on_text: TextCallback = ignore_text,
        cancelled: CancelCheck = never_cancelled,
        constraint: TokenConstraint | None = None,
        chances: ChanceLog | None = None,
    ) -> GenerationResult:
        """Continues a prompt given as tokens.

        Args:
            end_ids: tokens that end the answer; `None` is the model's own, the empty set lets it run to its limit.
            constraint, chances: see `generate`.

        Raises:
            EngineError: as `generate`.
        """
        ends = self._end_ids if end_ids is None else end_ids
        begun = perf_counter()
        return self._run(
            list(ids), 0, sampling, sampling.stop, ends, begun, on_progress, on_text, cancelled, constraint, chances
        )

    def _earlier(self, messages: Sequence[ChatMessage], ids: list[int], cancelled: CancelCheck) -> int:
        """How many tokens of a conversation, at its beginning, lie before what has been asked since the last answer."""
        answers = [number for number, message in enumerate(messages[:-1]) if message.role == "assistant"]
        if not answers or self._encodes:
            return 0
        try:
            before = self.prompt_ids(messages[: answers[-1] + 1], cancelled)
        except EngineError:  # a template that wants a question in the end
            return 0
        return next((at for at, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other), 0)

    def _run(
        self,
        ids: list[int],
        earlier: int,
        sampling: SamplingParams,
        stop: tuple[str, ...],
        end_ids: frozenset[int],
        begun: float,
        on_progress: ProgressCallback,
        on_text: TextCallback,
        cancelled: CancelCheck,
        constraint: TokenConstraint | None,
        chances: ChanceLog | None,
    ) -> GenerationResult:
        if not ids:
            raise EngineError(ErrorCode.INVALID_REQUEST, "The prompt is empty: write something first.")
        room = self._session.room(len(ids))
        if room < 1:
            check_length(len(ids), self._loaded.context_tokens)
        limits = AnswerLimits.within(room, sampling, end_ids, stop)
        run = (
            partial(decode_beams, earlier=earlier)
            if sampling.beams > 1
            else partial(decode, constraint=constraint, earlier=earlier, chances=chances)
        )
        guesses: Speculation | None = None
        if RECORDER.on:
            RECORDER.begin_request(seconds_ns(begun))
            RECORDER.phase(lanes.PROMPT, 0)
        try:
            with torch.inference_mode():
                logits, reused = self._session.prefill(ids, on_progress, cancelled)
                prefix = self._session.answer_prefix(ids)
                alone = self._loaded.token_by_token() if sampling.beams == 1 else nullcontext()
                session: Any = self._session
                if self._speculates and sampling.beams == 1 and isinstance(session, KvSession):
                    session = guesses = Speculation(session, self._prices, prefix, limits.max_tokens)
                with alone:
                    done = run(logits, session, sampling, limits, prefix, self._tokenizer, on_text, cancelled)
                if guesses is not None:
                    guesses.settle()
        except RequestCancelled:
            return GenerationResult("", "cancelled", len(ids), 0, 0, 0.0, 0.0)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._session.clear()
            raise EngineError(
                ErrorCode.NOT_ENOUGH_MEMORY,
                f"There is not enough memory for a context of {len(ids):,} prompt tokens: shorten the "
                f"conversation, close other programs or choose a smaller model.",
            ) from error
        finally:
            RECORDER.end_request()
        if self._loaded.foresight is not None:
            self._loaded.foresight.learn_while_idle()
        decoding = done.last_s - done.first_s
        return GenerationResult(
            text=done.text,
            finish_reason=done.reason,
            prompt_tokens=len(ids),
            reused_tokens=reused,
            generated_tokens=len(done.ids),
            ttft_s=done.first_s - begun,
            tokens_per_s=(done.timed_tokens - 1) / decoding if done.timed_tokens > 1 and decoding > 0 else 0.0,
            token_ids=tuple(done.ids),
            stopped_by=done.stopped_by,
            guessed_tokens=guesses.guessed if guesses is not None else 0,
            accepted_tokens=guesses.accepted if guesses is not None else 0,
        )


def decode(
    logits: torch.Tensor,
    session: Session,
    sampling: SamplingParams,
    limits: AnswerLimits,
    prefix: Sequence[int],
    tokenizer: Any,
    on_text: TextCallback,
    cancelled: CancelCheck,
    constraint: TokenConstraint | None = None,
    earlier: int = 0,
    chances: ChanceLog | None = None,
) -> Decoded:
    """One token at a time, starting from the logits [1, V] after the prompt.

    Args:
        prefix, constraint, earlier, chances: see `AnswerSequence`.
    """
    answer = AnswerSequence(
        prefix, sampling, limits, tokenizer, constraint, logits.device, earlier=earlier, chances=chances
    )
    first_s = last_s = 0.0
    reason: FinishReason | None = None
    of_step = 0
    while reason is None:
        token = answer.choose(logits)
        token_id = int(token)
        last_s = perf_counter()
        of_step += 1
        # A step lasts until a token is chosen that was not tried with it.
        if RECORDER.on and not session.foresaw(token_id):
            RECORDER.phase(lanes.DECODE if len(answer.ids) >= of_step else lanes.SAMPLE, of_step, seconds_ns(last_s))
            of_step = 0
        if not answer.ids:
            first_s = last_s
        text, reason = answer.take(token_id)
        on_text(text, len(answer.ids))
        if reason is None and cancelled():
            text, reason = answer.end("cancelled")
            on_text(text, len(answer.ids))
        if reason is None:
            logits = session.step(token, token_id)
    if RECORDER.on and of_step:
        RECORDER.phase(lanes.DECODE, of_step, seconds_ns(last_s))
    return Decoded(answer.ids, answer.text, reason, first_s, last_s, len(answer.ids), answer.stopped_by)


def time_decode(
    loaded: LoadedModel,
    prompt: Sequence[int],
    tokens: int,
    *,
    seconds: float = float("inf"),
    speculates: bool = False,
    on_token: Callable[[int, float], None] = lambda _count, _rate: None,
    cancelled: CancelCheck = never_cancelled,
) -> DecodeRate:
    """Continues a prompt greedily by `tokens` tokens after the first, past any end token.

    Args:
        seconds: a slow model is stopped after so long, with the tokens that it has made, four at the least.
        speculates: whether coming tokens may be guessed; what repeats itself would be timed as if all answers did.
        on_token: called with their number, and the rate since the first.

    Raises:
        EngineError: as `ChatSession.generate`.
    """
    arrivals: list[tuple[int, float]] = []
    begun = perf_counter()

    def on_text(_text: str, count: int) -> None:
        if arrivals and count == arrivals[-1][0]:
            return  # what was held back of the text: no further token
        arrivals.append((count, perf_counter()))
        first, since = arrivals[0]
        if count > first:
            on_token(count - first, (count - first) / (arrivals[-1][1] - since))

    def enough() -> bool:
        if cancelled():
            return True
        return bool(arrivals) and arrivals[-1][0] > _FEWEST_TOKENS and perf_counter() - arrivals[0][1] > seconds

    session = ChatSession(loaded, speculates=speculates)
    try:
        session.generate_from_ids(
            list(prompt), SamplingParams(max_tokens=tokens + 1), on_text=on_text, cancelled=enough, end_ids=frozenset()
        )
    finally:
        session.clear()
    if not arrivals:
        return DecodeRate(0.0, 0.0, 0)
    # Not every token completes a text.
    (first, first_s), (last, last_s) = arrivals[0], arrivals[-1]
    rate = (last - first) / (last_s - first_s) if last > first else 0.0
    return DecodeRate(rate, first_s - begun, last - first)
