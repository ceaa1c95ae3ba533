"""Control tokens that a person typed stay text: they are marked before a template is rendered, and found again after.

As transformers does it with `sanitize_control_tokens`; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

_BEGIN, _END = "\U000f0000", "\U000f0001"


class Encoder(Protocol):
    """A tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, those that control the model among them, with nothing added at its ends."""

    def encode_as_text(self, text: str) -> list[int]:
        """The same with what looks like a control token spelt out."""

    def token_id(self, token: str) -> int | None:
        """The number of a token."""


def marked(value: Any, tokens: Sequence[str]) -> Any:
    """A value for a template, with every control token in its texts between two marks."""
    if isinstance(value, str):
        bare = value.replace(_BEGIN, "").replace(_END, "")  # nobody can forge them
        return _patterns(tuple(tokens))[0].sub(rf"{_BEGIN}\g<0>{_END}", bare)
    if isinstance(value, dict):
        return {key: marked(entry, tokens) for key, entry in value.items()}
    if isinstance(value, list):
        return [marked(entry, tokens) for entry in value]
    return value


def encode_marked(encoder: Encoder, text: str, tokens: Sequence[str]) -> list[int]:
    """Tokens of a text with marks in it.

    Args:
        tokens: all that the vocabulary has beside its ordinary ones.

    Raises:
        ValueError: a control token cannot be spelt out.
    """
    # Text, token, text, token, ..., text; None for the token of a mark that has lost its other half.
    pieces = _patterns(tuple(tokens))[1].split(text)
    line_break = encoder.encode("\n")
    ids = list(encoder.encode(pieces[0]))
    for place, piece in enumerate(pieces[1:], start=1):
        if not piece:
            continue
        as_text = place % 2 == 1
        encode = encoder.encode_as_text if as_text else encoder.encode
        # Behind a line break, which is taken away again: at the beginning of a text some tokenizers add a space.
        found = encode("\n" + piece)
        found = found[len(line_break) :] if found[: len(line_break)] == line_break else encode(piece)
        if as_text and encoder.token_id(piece) in found:
            raise ValueError(f"{piece!r} cannot be written as text")
        ids += found
    return ids


@lru_cache(4)
def _patterns(tokens: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    return control, re.compile(f"{_BEGIN}({control.pattern}){_END}|[{_BEGIN}{_END}]")
