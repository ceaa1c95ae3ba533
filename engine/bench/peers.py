"""The peers that `bench decode` runs beside us, each on the same prompt, tokens, precision and threads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence


class TransformersPeer:
    """transformers' own `generate`, greedy, on a checkpoint directory.

    Args:
        experts_implementation: how transformers computes experts; `None` is its default for the model.
    """

    def __init__(self, name: str, path: Path, dtype: torch.dtype, experts_implementation: str | None = None) -> None:
        self.name = name
        options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
        if experts_implementation:
            options["experts_implementation"] = experts_implementation
        self._model = AutoModelForCausalLM.from_pretrained(path, **options).eval()

    def decode_rate(self, prompt: Sequence[int], tokens: int) -> float:
        """Tokens per second of decode: the time of `tokens` + 1 new tokens less that of the first."""
        seconds_first = self._time(prompt, 1)
        seconds_all = self._time(prompt, tokens + 1)
        return tokens / (seconds_all - seconds_first)

    def _time(self, prompt: Sequence[int], new_tokens: int) -> float:
        ids = torch.tensor([list(prompt)])
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                repetition_penalty=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - started
