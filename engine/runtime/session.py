"""What the decoding loop needs of a model with its caches, whatever its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.runtime.beam_search import BeamModel
from engine.runtime.generation import CancelCheck, ProgressCallback


class Session(Protocol):
    """A model that reads a prompt and then takes one token at a time."""

    @property
    def tokens(self) -> int:
        """Tokens held in the KV cache."""

    @property
    def bytes(self) -> int:
        """Bytes held by the KV cache."""

    def clear(self) -> None:
        """Frees the KV cache."""

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may follow a prompt of this length; 0 or less if it is too long."""

    def answer_prefix(self, prompt: Sequence[int]) -> list[int]:
        """Tokens that the answer continues: what a repetition penalty counts before the first token."""

    def prefill(
        self, prompt: Sequence[int], on_progress: ProgressCallback, cancelled: CancelCheck
    ) -> tuple[torch.Tensor, int]:
        """Reads the prompt: logits [1, V] after it, and how many of its tokens were reused from the cache."""

    def step(self, token: torch.Tensor, token_id: int) -> torch.Tensor:
        """Appends one token [1, 1] int64, whose id is `token_id`; logits [1, V] after it."""

    def beams(self, width: int) -> BeamModel:
        """`width` sequences that all hold what this session holds; it takes no further `step` for this prompt."""
