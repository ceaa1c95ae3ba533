"""A request that waits or is being answered, wherever that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.common import clock
from engine.common.chat import FinishReason
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.sequence import AnswerSequence
from engine.runtime.kept.prefixes import Reused
from engine.runtime.schedule.request import BatchAnswer, BatchRequest, PreparedRow

Outcome = GenerationResult | BaseException
"""What was answered, or why nothing was."""
OnEnd = Callable[[Outcome], None]


@dataclass(eq=False)
class Asked:
    """A request, and when its tokens came."""

    request: BatchRequest
    end: OnEnd
    on_begin: Callable[[], None]
    begun_s: float
    on_token: Callable[[], None] = lambda: None
    prepared: PreparedRow | None = None
    has_moved: bool = False
    outgrown: AnswerSequence | None = None
    """Its answer so far, once it is longer than all pages: it goes on alone."""
    reused: Reused = field(default_factory=Reused)
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def on_text(self, text: str, tokens: int) -> None:
        if tokens > self.tokens:
            self.last_s = clock.now()
            self.first_s = self.first_s or self.last_s
            self.tokens = tokens
            self.on_token()
        self.request.on_text(text, tokens)

    def result(self, answer: BatchAnswer) -> GenerationResult:
        reason: FinishReason = "cancelled" if answer.finish_reason == "failed" else answer.finish_reason
        result = GenerationResult(
            answer.text,
            reason,
            answer.prompt_tokens,
            answer.shared_tokens,
            answer.generated_tokens,
            0.0,
            0.0,
            answer.token_ids,
            stopped_by=answer.stopped_by,
            from_ram=answer.from_ram,
            from_disk=answer.from_disk,
        )
        return self.timed(result)

    def timed(self, result: GenerationResult) -> GenerationResult:
        """With the times of all its tokens, and what was reused for it, wherever that was."""
        took = self.last_s - self.first_s
        return replace(
            result,
            reused_tokens=max(result.reused_tokens, self.reused.tokens),
            from_ram=max(result.from_ram, self.reused.ram),
            from_disk=max(result.from_disk, self.reused.disk),
            ttft_s=self.first_s - self.begun_s if self.tokens else 0.0,
            tokens_per_s=(self.tokens - 1) / took if self.tokens > 1 and took > 0 else 0.0,
        )
