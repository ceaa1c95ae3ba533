"""Keeps control tokens in user text plain text: marks them before a template is rendered, and encodes them after.

Equivalent to transformers' `sanitize_control_tokens`; a test compares the two.
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
        """Tokens of a text, including control tokens, with nothing added at its ends."""

    def encode_as_text(self, text: str) -> list[int]:
        """The same with control tokens encoded as plain text."""

    def token_id(self, token: str) -> int | None:
        """The id of a token."""


def marked(value: Any, tokens: Sequence[str]) -> Any:
    """A value for a template, with every control token in its texts between two marks."""
    if isinstance(value, str):
        bare = value.replace(_BEGIN, "").replace(_END, "")  # marks cannot be forged
        return _patterns(tuple(tokens))[0].sub(rf"{_BEGIN}\g<0>{_END}", bare)
    if isinstance(value, dict):
        return {key: marked(entry, tokens) for key, entry in value.items()}
    if isinstance(value, list):
        return [marked(entry, tokens) for entry in value]
    return value


def encode_marked(encoder: Encoder, text: str, tokens: Sequence[str]) -> list[int]:
    """Tokens of a marked text.

    Args:
        tokens: all special tokens of the vocabulary.

    Raises:
        ValueError: a control token cannot be encoded as text.
    """
    # Text, token, text, token, ..., text; None for the token of an unpaired mark.
    pieces = _patterns(tuple(tokens))[1].split(text)
    line_break = encoder.encode("\n")
    ids = list(encoder.encode(pieces[0]))
    for place, piece in enumerate(pieces[1:], start=1):
        if not piece:
            continue
        as_text = place % 2 == 1
        encode = encoder.encode_as_text if as_text else encoder.encode
        # After a line break, which is removed again: some tokenizers add a space at the beginning of a text.
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
