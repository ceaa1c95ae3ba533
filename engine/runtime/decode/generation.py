"""What a generation needs of a model, and what it reports while it runs and when it is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, FinishReason, PromptEnd, Tool, ToolCall, ToolChoice
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, EngineError, never_cancelled

if TYPE_CHECKING:
    import torch

ProgressCallback = Callable[[int, int], None]
"""Prompt tokens read so far, and prompt tokens to read."""

TextCallback = Callable[[str, int], None]
"""Text to append, final as it stands (it may be empty), and tokens generated so far."""


@dataclass(frozen=True, slots=True)
class Chances:
    """How likely the model found a token before penalties and filters.

    Attributes:
        token_id, logprob: the chosen token and the logarithm of its probability.
        likeliest: (token id, logprob) of the most likely ones, most likely first.
    """

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class ChanceLog:
    """Collects the chances of an answer's tokens, with the `top` most likely ones of each."""

    top: int
    tokens: list[Chances] = field(default_factory=list)


class TokenConstraint(Protocol):
    """What an answer must satisfy, token by token; one object for each answer."""

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [V] with those of tokens that may not come next at -inf."""

    def accept(self, token_id: int) -> bool:
        """Takes the token that was chosen; whether the answer is complete with it."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One answer.

    Attributes:
        text: the answer, without stop string and special tokens; all that was reported, in one piece.  That of a row
            which failed is its text so far.
        finish_reason: why it ended.
        prompt_tokens: length of the whole prompt; `reused_tokens` of them did not have to be read: of these,
            `from_ram` and `from_disk` had been kept there, and the others were still in the KV cache or in pages.
        generated_tokens: tokens that the model chose, an end-of-sequence token among them.
        ttft_s: seconds from the start of the request to its first token; 0 if there was none.
        tokens_per_s: decode rate after the first token; 0 if fewer than two tokens came.
        token_ids: the generated tokens.
        guessed_tokens: tokens that were tried ahead; the answer went on with `accepted_tokens` of them.
        pictures: in the prompt; `pictures_kept` of them had been read before, the others took `pictures_s` seconds.
        stopped_by: the stop string that ended it, unless it was searched for with beams; empty if none did.
        reasoning, calls: what the model thought before it, and calls of tools, if they were told apart.
        row: of the request; see `BatchRequest`.
        error: why there is none, or no more of it; `None` if it was answered.
    """

    text: str = ""
    finish_reason: FinishReason = "cancelled"
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    tokens_per_s: float = 0.0
    token_ids: tuple[int, ...] = ()
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    pictures: int = 0
    pictures_kept: int = 0
    pictures_s: float = 0.0
    stopped_by: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    from_ram: int = 0
    from_disk: int = 0
    row: int = 0
    error: EngineError | None = None


Outcome = GenerationResult | BaseException
"""What was answered, or why nothing was."""
OnEnd = Callable[[Outcome], None]


def ignore_progress(done: int, total: int) -> None:
    """For callers that do not watch the prompt being read."""


def ignore_text(text: str, generated_tokens: int) -> None:
    """For callers that only want the result."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What is to be answered: a conversation, or what comes after tokens or a text.

    Attributes:
        row: index in the input.
        ids, text: the prompt in the place of `messages`; a text gets what the tokenizer adds at its ends if `special`.
        tools, choice: what the answer to `messages` may or must call.
        end: how the prompt of `messages` ends.
        constraint: what the answer must satisfy; of one to `messages`, what comes behind the reasoning.
        end_ids: tokens that end the answer; `None` for the model's own.
        chances: takes how likely each token was, if anybody asks.
        chat: of which it is a turn: what is computed of it may be kept on disk, as that chat's; empty: only in RAM.
        splits: the answer to `messages` is told apart from the reasoning before it, and from calls of tools.
        on_progress: told how much of the prompt has been read.
        on_text: told after each token of the answer; then without the reasoning, which `on_reasoning` is told.
        on_reused: told how many tokens of the prompt were brought from RAM and from disk, and how long that took; it
            may never be called.
        cancelled: asked between sweeps: whether nobody wants the answer any more; it then ends as `cancelled`.
    """

    row: int
    messages: tuple[ChatMessage, ...] = ()
    ids: tuple[int, ...] = ()
    text: str | None = None
    special: bool = True
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    end: PromptEnd = "answer"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | TokenConstraint | None = None
    end_ids: frozenset[int] | None = None
    chances: ChanceLog | None = None
    chat: str = ""
    splits: bool = False
    on_progress: ProgressCallback = ignore_progress
    on_text: TextCallback = ignore_text
    on_reasoning: TextCallback = ignore_text
    on_reused: Callable[[int, int, float], None] = lambda _from_ram, _from_disk, _seconds: None
    cancelled: CancelCheck = never_cancelled

    @property
    def repeats(self) -> bool:
        """Whether its answer is to be the same another time, bit by bit, whatever was read before and beside it."""
        return self.sampling.seed is not None

    @property
    def is_chat(self) -> bool:
        return not self.ids and self.text is None
