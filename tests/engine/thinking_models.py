"""Tiny models that think: real ones, whose tokens are written for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from engine.families.replies import HARMONY_MARKS
from engine.runtime.decode.sequence import Sequence
from tests.engine.tiny_families import tiny_checkpoint
from tests.engine.tiny_tokenizer import TEMPLATE

SWITCHED = TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}",
)
"""Like Qwen 3's: it closes the reasoning where it is turned off."""
OPENED = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Like DeepSeek R1's: it opens the reasoning itself."""


def thinking_checkpoint(family: str, folder: Path, template: str = SWITCHED) -> Path:
    """A tiny model with this template, and with marks of reasoning in its vocabulary: harmony's are control tokens."""
    tiny_checkpoint(family, folder, vocab_size=340)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY_MARKS)})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def write_for(monkeypatch: pytest.MonkeyPatch, text_after: Callable[[str], str]) -> None:
    """Has every model write what `text_after` its prompt, token by token, and then end.

    Where a constraint does not allow a token of that, the likeliest one that it allows comes instead.
    """
    scripts: dict[int, list[int]] = {}
    begin = Sequence.begin

    def begins(self: Sequence, prefix: list[int], *rest: Any) -> None:
        begin(self, prefix, *rest)
        text = text_after(self.tokenizer.decode(prefix))
        scripts[id(self)] = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *self.end_ids][:999]
        self.is_greedy = False

    def choose(self: Sequence, logits: torch.Tensor) -> torch.Tensor:
        allowed = self._changed(logits)[0]
        script = scripts[id(self)]
        token = script[len(self.ids)] if len(self.ids) < len(script) else 0
        return torch.tensor([[token if allowed[token] > float("-inf") else int(allowed.argmax())]])

    monkeypatch.setattr(Sequence, "begin", begins)
    monkeypatch.setattr(Sequence, "choose", choose)
