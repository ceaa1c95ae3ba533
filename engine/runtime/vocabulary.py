"""Single tokens of a vocabulary, without copying all of it: `get_vocab` takes tens of milliseconds."""

from __future__ import annotations

from typing import Any


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token, written as in the vocabulary; `None` if there is no such token."""
    index = tokenizer.convert_tokens_to_ids(token)
    # Unknown tokens have the id of the unknown token, if the vocabulary has one.
    if index is None or tokenizer.convert_ids_to_tokens(index) != token:
        return None
    return int(index)
