"""One answer, token by token: how each token is chosen, what ends it, and the text that may be shown of it.

Chats and rows of a batch are the same kind of `Sequence`.  What is done for one of them alone is done in `of_one`, so
that what goes wrong there ends it and no other.
"""

from __future__ import annotations

import logging
import traceback
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from engine.common import clock
from engine.common.chat import FinishReason, ToolCall
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.devices.failures import is_fault_of_device, is_out_of_memory
from engine.families.replies.reader import Part, ReplyReader, Spoken, Thought
from engine.runtime.decode.detokenizer import IncrementalDetokenizer
from engine.runtime.decode.generation import (
    BatchRequest,
    GenerationResult,
    OnEnd,
    Outcome,
    TokenConstraint,
    ignore_text,
)
from engine.runtime.decode.prompt import encode
from engine.runtime.decode.sampling import (
    DryPenalty,
    bias_vector,
    breakers_of,
    chances_of,
    greedy_token,
    make_chooser,
    penalise_presence,
    penalise_repetition,
)
from engine.runtime.load.tokenizer import token_id

if TYPE_CHECKING:
    from engine.runtime.pictures import Layout

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class SequenceError(EngineError):
    """What is wrong with one sequence: it ends, and all others go on."""


@contextmanager
def of_one() -> Iterator[None]:
    """Inside, something is done for one sequence alone: whatever goes wrong is its error.

    Raises:
        SequenceError: for every exception but a cancelling, and the fault of a device, which concerns everybody.
    """
    try:
        yield
        return
    except (SequenceError, RequestCancelled):
        raise
    except Exception as error:
        if is_fault_of_device(error):
            raise
        wrong = wrong_with_one(error)
    # Not in the handler: the exception's frames would keep tensors alive.
    raise wrong


def alone_with(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The same function, done in `of_one`."""

    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with of_one():
            return call(*args, **kwargs)

    return called


def wrong_with_one(error: BaseException) -> SequenceError:
    """The same as one sequence's error."""
    if isinstance(error, EngineError):
        return SequenceError(error.code, error.message)
    if is_out_of_memory(error):
        words = "There was not enough memory to choose this answer's next token: close other programs and ask again."
        return SequenceError(ErrorCode.NOT_ENOUGH_MEMORY, words)
    # Without the exception's text, which can quote a prompt or an answer.
    name, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
    _log.error("one sequence failed: %s\n%s", name, "".join(traceback.format_tb(error.__traceback__)))
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    words = f"This answer ended by an internal error ({name}{where}); the log has the details for a bug report."
    return SequenceError(ErrorCode.INTERNAL, words)


END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end|>",
)
"""Tokens that close an assistant's turn in the chat formats in use."""


class Sequence:
    """One request, from the moment it is sent to the end of its answer.

    `prepared` fills in its prompt and what its answer is held to, `begin` what chooses its tokens.  Whoever computes it
    holds its pages.  It goes on as it is where the model moves to another device.

    Tokens that end it are never penalised: they stand in every prompt of a chat, and an answer must be able to end.

    Attributes:
        request: what was asked.
        prompt: its tokens; none until it is prepared.
        layout: where pictures lie in the prompt, if there are any.
        thinks: the prompt ends by opening the model's reasoning.
        is_call: all but the reasoning is one call as JSON, in no family's form.
        end_ids, stop: tokens and strings that end its answer.
        max_tokens: most tokens to generate, and `reached` is the finish reason when they have been.
        earlier: how many of the prompt's first tokens are of earlier turns of a chat. The repetition penalty does not
            count them: to the same question the same answer is right.
        ids: tokens of the answer so far, an end token included; `told` of them whoever asked knows of.
        is_greedy: whether the next token is simply the most likely one.
        begun_s: when it was asked, by `perf_counter`.
        on_end, on_begin, on_token: see `Scheduler.submit`; the last is told whenever a token is.
    """

    def __init__(self, request: BatchRequest) -> None:
        self.request, self.begun_s = request, clock.now()
        self.on_end: OnEnd = lambda _outcome: None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_token: Callable[[], None] = lambda: None
        self.prompt: list[int] = []
        self.layout: Layout | None = None
        self.earlier, self.thinks, self.is_call = 0, False, False
        self.ids: list[int] = []
        self._parts: list[str] = []
        self.told, self._first_s, self._last_s = 0, 0.0, 0.0
        self._reader: ReplyReader | None = None
        self._said: list[Part] = []
        """What that has made of the answer's text."""
        self._is_read = False

    def prepared(
        self,
        prompt: list[int],
        tokenizer: Any,
        room: int,
        end_ids: frozenset[int],
        stop: tuple[str, ...] = (),
        constraint: TokenConstraint | None = None,
        *,
        shown: tuple[int, ...] = (),
        reader: ReplyReader | None = None,
    ) -> None:
        """It can be answered.

        Args:
            room: tokens that may follow the prompt.
            constraint: what the answer must satisfy; it knows of no token yet.  Penalties then only choose among the
                tokens that it allows, and DRY always counts the answer alone: copying from the prompt, or a choice that
                the prompt names, is what was asked for.
            shown: control tokens that are part of its text.
            reader: tells the answer apart from the reasoning and from calls of tools.
        """
        most = self.request.sampling.max_tokens
        self.prompt, self.tokenizer, self._constraint, self._reader = prompt, tokenizer, constraint, reader
        self.end_ids, self.stop, self.max_tokens = end_ids, stop, min(most, room)
        self.reached: FinishReason = "length" if most <= room else "context"
        self._detokenizer, self._stops = IncrementalDetokenizer(tokenizer, shown), StopStrings(stop)

    def begin(self, prefix: list[int], device: torch.device = _CPU) -> None:
        """Makes what chooses tokens from logits on this device; again, if it was on another.

        Args:
            prefix: tokens that it continues, which a repetition penalty counts, and DRY if it has a range.
        """
        sampling, chances, constraint = self.request.sampling, self.request.chances, self._constraint
        self._seen: torch.Tensor | None = None
        """Token ids [1, n] of the context that are penalised: `_counted` of the prompt, and after them the answer's."""
        if sampling.repetition_penalty != 1:
            counted = [token for token in prefix[self.earlier :] if token not in self.end_ids]
            self._counted = len(counted)
            room = torch.zeros(self.max_tokens - len(self.ids), dtype=torch.long)
            self._seen = torch.cat((torch.tensor([*counted, *self.ids], dtype=torch.long), room))[None].to(device)
        before = [] if constraint is not None else prefix
        self._dry = dry_penalty(before, self.ids, sampling, self.end_ids, self.tokenizer)
        self._choose = make_chooser(sampling, device)
        self._bias: torch.Tensor | None = None
        changes = sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty
        is_plain = self._seen is None and self._dry is None and constraint is None and chances is None
        self.is_greedy = self._choose is greedy_token and is_plain and not changes

    @property
    def known_prompt(self) -> list[int]:
        """The prompt's tokens with one that the tokenizer knows in place of pictures'."""
        return self.prompt if self.layout is None else self.layout.sight.text(self.prompt)

    @property
    def text(self) -> str:
        """What may be shown of it so far, as the model wrote it."""
        return "".join(self._parts)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token [1, 1] int64 from logits [1, V].

        Raises:
            EngineError: `MODEL_UNSUPPORTED`: the logits are no numbers; `INVALID_REQUEST`: no token is allowed.
        """
        if self.is_greedy:
            token = greedy_token(logits)
            check_finite(logits[0, token], len(self.ids))
            return token
        check_finite(logits.amax(), len(self.ids))
        changed = self._changed(logits)
        if self._constraint is not None and not bool(changed.amax().isfinite()):
            words = f"No token may follow the first {len(self.ids):,} of the answer: its schema or choices allow none."
            raise EngineError(ErrorCode.INVALID_REQUEST, words)
        token = self._choose(changed)
        if (log := self.request.chances) is not None:
            log.tokens.append(chances_of(logits[0], int(token), log.top))
        return token

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after what makes tokens more or less likely, and what rules them out."""
        sampling = self.request.sampling
        if sampling.logit_bias:
            if self._bias is None:  # once: there may be one for every token of the vocabulary
                self._bias = bias_vector(sampling.logit_bias, logits)
            logits = logits.float() + self._bias
        if sampling.presence_penalty or sampling.frequency_penalty:
            logits = penalise_presence(logits.float(), torch.tensor(self.ids, dtype=torch.long), sampling)
        if self._seen is not None:
            seen = self._seen[:, : self._counted + len(self.ids)]
            logits = penalise_repetition(logits.float(), seen, sampling.repetition_penalty)
        if self._dry is not None:
            logits = self._dry.apply(logits.float())
        if self._constraint is not None:
            logits = self._constraint.restrict(logits[0].float())[None]
        return logits

    def become(self, ids: list[int], text: str) -> None:
        """It is an answer that was found whole."""
        self.ids, self._parts = ids, [text]

    def take(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Adds a token; the text that has become certain with it, and why the answer ends here if it does."""
        self.ids.append(token_id)
        if token_id in self.end_ids:
            return self.end("stop")
        if self._seen is not None:
            self._seen[0, self._counted + len(self.ids) - 1] = token_id
        if self._dry is not None:
            self._dry.append(token_id)
        complete = self._constraint is not None and self._constraint.accept(token_id)
        text, stopped = self._stops.feed(self._detokenizer.feed(token_id))
        self._parts.append(text)
        if stopped:
            return text, "stop_string"
        if not complete and len(self.ids) < self.max_tokens:
            return text, None
        rest, reason = self.end("stop" if complete else self.reached)
        return text + rest, reason

    def end(self, reason: FinishReason) -> tuple[str, FinishReason]:
        """Ends it: the text that was held back, and the reason, unless that text completes a stop string."""
        # It can do so only with a character that was still incomplete.
        text, stopped = self._stops.feed(self._detokenizer.flush())
        if not stopped:
            text += self._stops.flush()
        self._parts.append(text)
        return text, "stop_string" if stopped else reason

    def tell(self, text: str, tokens: int) -> None:
        """Tells who asked of more of its text, and that it has so many tokens now."""
        if tokens > self.told:
            self._last_s = clock.now()
            self._first_s = self._first_s or self._last_s
            self.told = tokens
            self.on_token()
        if self._reader is None:
            self.request.on_text(text, tokens)
        elif self.request.on_text is not ignore_text:  # else it is read at its end
            self._read(self._reader.feed(text))

    def _read(self, parts: list[Part]) -> None:
        self._said += parts
        thought, text = (_joined(parts, kind) for kind in (Thought, Spoken))
        if thought:
            self.request.on_reasoning(thought, self.told)
        if text or not thought:
            self.request.on_text(text, self.told)

    def result(
        self, reason: FinishReason = "cancelled", error: EngineError | None = None, **read: Any
    ) -> GenerationResult:
        """Its outcome, with what is known of how its prompt was read; what its reader held back is told before."""
        try:
            self._end_reading()
        except SequenceError as unreadable:
            error = error or unreadable
        took = self._last_s - self._first_s
        return GenerationResult(
            self.text if self._reader is None else _joined(self._said, Spoken),
            reason,
            len(self.prompt),
            generated_tokens=len(self.ids),
            ttft_s=self._first_s - self.begun_s if self.told else 0.0,
            tokens_per_s=(self.told - 1) / took if self.told > 1 and took > 0 else 0.0,
            token_ids=tuple(self.ids),
            stopped_by=self._stops.found,
            reasoning=_joined(self._said, Thought),
            calls=tuple(part for part in self._said if isinstance(part, ToolCall)),
            row=self.request.row,
            error=error,
            **read,
        )

    def _end_reading(self) -> None:
        was_read, self._is_read = self._is_read, True
        with of_one():
            if self._reader is not None and not was_read:
                unread = self.text if self.request.on_text is ignore_text else ""
                if parts := [*self._reader.feed(unread), *self._reader.end()]:
                    self._read(parts)

    def ended(self, outcome: Outcome) -> None:
        """Tells how it ended; that nobody can be told harms no other."""
        with suppress(SequenceError):
            self._end_reading()
        try:
            with of_one():
                self.on_end(outcome)
        except SequenceError as error:
            _log.warning("the end of a request could not be told: %s", error.code)


def _joined(parts: list[Part], kind: type[Thought] | type[Spoken]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def check_finite(highest: torch.Tensor, tokens: int) -> None:
    """Raises EngineError `MODEL_UNSUPPORTED` unless the highest logit, of each sequence if of several, is a number.

    NaN counts as the highest of all.  A token at minus infinity is one that the model rules out.

    Args:
        tokens: that there are of the answer.
    """
    if not bool(highest.isfinite().all()):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"Token {tokens + 1:,} of the answer could not be chosen: the scores that the model gives are no numbers "
            "(NaN or infinite); its file may be damaged: check it with `switchyard models verify`, or try another "
            "--precision.",
        )


def dry_penalty(
    prefix: abc.Sequence[int], ids: abc.Sequence[int], sampling: SamplingParams, end_ids: frozenset[int], tokenizer: Any
) -> DryPenalty | None:
    """DRY for an answer; `None` if it is off.

    Without a range it counts the answer alone. A loop is within one answer; who asks the same again in a chat, or for a
    quotation, wants to read the same again.

    Args:
        prefix: tokens that the answer continues.
        ids: its own so far.
    """
    if not sampling.uses_dry:
        return None
    history = ids if sampling.dry_range < 0 else [*prefix, *ids]
    breakers = breakers_of(tokenizer, sampling.dry_breakers, lambda text: encode(tokenizer, text, special=False))
    return DryPenalty(history, sampling, breakers, end_ids)


class StopStrings:
    """Holds back text that may turn out to be the beginning of a stop string.

    The first stop string to be completed ends the text; text before its beginning is final.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self.found = ""
        """The stop string that ended the text, once one has."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what is now certain to belong to the answer, and whether a stop string ended it."""
        if not self._stop or not text:
            return text, False
        self._held += text
        matches = [(begin + len(stop), begin) for stop in self._stop if (begin := self._held.find(stop)) >= 0]
        if matches:
            end, begin = min(matches)  # the one that is completed first; of those completed at once, the longest
            answer, self.found, self._held = self._held[:begin], self._held[begin:end], ""
            return answer, True
        # The longest end of it with which a stop string begins is kept.
        keep = min(max(map(len, self._stop)) - 1, len(self._held))
        while keep and not any(stop.startswith(self._held[-keep:]) for stop in self._stop):
            keep -= 1
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain, False

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        text, self._held = self._held, ""
        return text


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends an answer: what the model, its configs and its tokenizer name, and the chat format's.

    Base checkpoints often name only the end of a document although their chat template closes turns with a token of
    its own, so that one counts too if the template (or the fallback) uses it.
    """
    ids: set[int] = set()
    for holder in (
        getattr(model, "generation_config", None),
        model.config,
        model.config.get_text_config(decoder=True),
        tokenizer,
    ):
        ids.update(_as_ids(getattr(holder, "eos_token_id", None)))
    template = tokenizer.chat_template
    written = " ".join(template.values()) if isinstance(template, dict) else template
    for token in END_OF_TURN_TOKENS:
        # In gpt-oss's format `<|end|>` ends a message, after which the same answer goes on in another channel.
        if token == "<|end|>" and token_id(tokenizer, "<|return|>") is not None:
            continue
        index = token_id(tokenizer, token)
        if index is not None and (written is None or token in written):
            ids.add(index)
    return frozenset(ids)


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, int):
        return [value]
    return [int(item) for item in value]
