"""One answer, token by token: how each token is chosen, what ends it, and the text that may be shown of it.

Chats and rows of a batch generate through the same `AnswerSequence`; beams share its limits and stop strings.  What is
done for one answer alone is done in `of_one`, so that what goes wrong there ends that answer and no other.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from engine.common.chat import FinishReason
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.devices.failures import is_fault_of_device, is_out_of_memory
from engine.runtime.decode.detokenizer import IncrementalDetokenizer
from engine.runtime.decode.generation import ChanceLog, TokenConstraint
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

_log = logging.getLogger(__name__)
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


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """What ends an answer.

    Attributes:
        end_ids: tokens that end it.
        stop: strings that end it.
        max_tokens: most tokens to generate, and `reached` is the finish reason when they have been.
    """

    end_ids: frozenset[int]
    stop: tuple[str, ...]
    max_tokens: int
    reached: FinishReason

    @classmethod
    def within(
        cls, room: int, sampling: SamplingParams, end_ids: frozenset[int], stop: tuple[str, ...]
    ) -> AnswerLimits:
        """As many tokens as were asked for, where the context has room for so many."""
        reached: FinishReason = "length" if sampling.max_tokens <= room else "context"
        return cls(end_ids, stop, min(sampling.max_tokens, room), reached)


class AnswerSequence:
    """An answer while it is generated.

    Tokens that end it are never penalised: they stand in every prompt of a chat, and an answer must be able to end.

    Args:
        prefix: tokens that it continues, which a repetition penalty counts from the start, and DRY if it has a range.
        device: of the logits.
        constraint: what it must satisfy; it knows of no token yet.  Penalties then only choose among the tokens that
            it allows, and DRY always counts the answer alone: copying from the prompt, or a choice that the prompt
            names, is what was asked for.
        earlier: how many of the first tokens of the prefix are of earlier turns of a chat. The repetition penalty does
            not count them: to the same question the same answer is right.
        chances: takes how likely each token was.
        shown: control tokens that are part of its text.

    Attributes:
        ids: its tokens so far, an end token included.
        is_greedy: whether the next token is simply the most likely one.
    """

    def __init__(
        self,
        prefix: Sequence[int],
        sampling: SamplingParams,
        limits: AnswerLimits,
        tokenizer: Any,
        constraint: TokenConstraint | None = None,
        device: torch.device | None = None,
        *,
        earlier: int = 0,
        chances: ChanceLog | None = None,
        shown: tuple[int, ...] = (),
    ) -> None:
        device = device or torch.device("cpu")
        self._limits, self._constraint = limits, constraint
        self._penalty = sampling.repetition_penalty
        self._counted = list[int]()
        self._seen: _Seen | None = None
        if self._penalty != 1:
            self._counted = [token for token in prefix[earlier:] if token not in limits.end_ids]
            self._seen = _Seen(self._counted, limits.max_tokens, device)
        self._dry = dry_penalty([] if constraint is not None else prefix, [], sampling, limits.end_ids, tokenizer)
        self._choose = make_chooser(sampling, device)
        self._sampling, self._chances = sampling, chances
        self._bias: torch.Tensor | None = None
        self._penalises_presence = bool(sampling.presence_penalty or sampling.frequency_penalty)
        changes = bool(sampling.logit_bias) or self._penalises_presence
        is_plain = not changes and (self._seen, self._dry, constraint, chances) == (None, None, None, None)
        self.is_greedy = self._choose is greedy_token and is_plain
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        self._stops = StopStrings(limits.stop)
        self._parts: list[str] = []
        self.ids: list[int] = []

    @property
    def text(self) -> str:
        """What may be shown of it so far."""
        return "".join(self._parts)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended it; empty if none did."""
        return self._stops.found

    def move(self, device: torch.device) -> None:
        """From now on logits are on this device; what it holds where they were is not read any more, and made again."""
        if self._seen is not None:
            self._seen = _Seen(self._counted, self._limits.max_tokens, device)
            for token_id in self.ids:
                self._seen.append(token_id)
        self._choose, self._bias = make_chooser(self._sampling, device), None

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
        if self._chances is not None:
            self._chances.tokens.append(chances_of(logits[0], int(token), self._chances.top))
        return token

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after what makes tokens more or less likely, and what rules them out."""
        if self._sampling.logit_bias:
            if self._bias is None:  # once: there may be one for every token of the vocabulary
                self._bias = bias_vector(self._sampling.logit_bias, logits)
            logits = logits.float() + self._bias
        if self._penalises_presence:
            logits = penalise_presence(logits.float(), torch.tensor(self.ids, dtype=torch.long), self._sampling)
        if self._seen is not None:
            logits = penalise_repetition(logits.float(), self._seen.ids(), self._penalty)
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
        limits = self._limits
        self.ids.append(token_id)
        if token_id in limits.end_ids:
            return self.end("stop")
        if self._seen is not None:
            self._seen.append(token_id)
        if self._dry is not None:
            self._dry.append(token_id)
        complete = self._constraint is not None and self._constraint.accept(token_id)
        text, stopped = self._stops.feed(self._detokenizer.feed(token_id))
        self._parts.append(text)
        if stopped:
            return text, "stop_string"
        if not complete and len(self.ids) < limits.max_tokens:
            return text, None
        rest, reason = self.end("stop" if complete else limits.reached)
        return text + rest, reason

    def end(self, reason: FinishReason) -> tuple[str, FinishReason]:
        """Ends it: the text that was held back, and the reason, unless that text completes a stop string."""
        # It can do so only with a character that was still incomplete.
        text, stopped = self._stops.feed(self._detokenizer.flush())
        if not stopped:
            text += self._stops.flush()
        self._parts.append(text)
        return text, "stop_string" if stopped else reason


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
    prefix: Sequence[int], ids: Sequence[int], sampling: SamplingParams, end_ids: frozenset[int], tokenizer: Any
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


class _Seen:
    """Token ids of the context so far, [1, n], grown in place."""

    def __init__(self, prefix: Sequence[int], max_tokens: int, device: torch.device) -> None:
        self._buffer = torch.zeros((1, len(prefix) + max_tokens), dtype=torch.long, device=device)
        self._buffer[0, : len(prefix)] = torch.tensor(prefix, dtype=torch.long, device=device)
        self._length = len(prefix)

    def ids(self) -> torch.Tensor:
        return self._buffer[:, : self._length]

    def append(self, token_id: int) -> None:
        self._buffer[0, self._length] = token_id
        self._length += 1


class StopStrings:
    """Holds back text that may turn out to be the beginning of a stop string.

    The first stop string to be completed ends the text; text before its beginning is final.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self.found = ""
        """The stop string that ended the text, once one has."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what is now certain to belong to the answer, and whether a stop string ended it."""
        if not self._stop or not text:
            return text, False
        self._held += text
        match = self._first_match()
        if match is not None:
            end, begin = match
            answer, self.found, self._held = self._held[:begin], self._held[begin:end], ""
            return answer, True
        keep = self._possible_beginning()
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain, False

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        text, self._held = self._held, ""
        return text

    def _first_match(self) -> tuple[int, int] | None:
        """Where the stop string that is completed first ends and begins; of those completed at once, the longest."""
        found = [(begin + len(stop), begin) for stop in self._stop if (begin := self._held.find(stop)) >= 0]
        return min(found) if found else None

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


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
