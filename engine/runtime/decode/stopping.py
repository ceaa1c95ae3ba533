"""When an answer is over: end-of-sequence tokens, and stop strings that are never shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.runtime.decode.detokenizer import token_id

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


class StopStrings:
    """Holds back text that may turn out to be the beginning of a stop string.

    The first stop string to be completed ends the text; text before its beginning is final.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what is now certain to belong to the answer, and whether a stop string ended it."""
        if not self._stop or not text:
            return text, False
        self._held += text
        begin = self._first_match()
        if begin is not None:
            answer, self._held = self._held[:begin], ""
            return answer, True
        keep = self._possible_beginning()
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(certain) :]
        return certain, False

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        text, self._held = self._held, ""
        return text

    def _first_match(self) -> int | None:
        """Where the stop string that is completed first begins; of those completed at once, the longest."""
        found = [(begin + len(stop), begin) for stop in self._stop if (begin := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
