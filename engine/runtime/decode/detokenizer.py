"""Tokens to text, one at a time, without decoding the answer again for every token."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from engine.runtime.load.tokenizer import token_id

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that byte-level vocabularies write as the character of the same number; the others follow from 256 on (Radford
et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2)."""
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
_MOST_HELD = 16
"""Tokens held back at most: longer runs of bytes that make no character are shown as they are."""


def decode_text(tokenizer: Any, ids: list[int]) -> str:
    """The text of these tokens, special tokens left out, spaces as the model wrote them."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What a token adds to the text, in UTF-8, also where that is no whole character."""
    text = str(tokenizer.decode([token]))
    if _REPLACEMENT not in text:
        return text.encode("utf-8")
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return text.encode("utf-8")


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens; joined, its pieces are `decode_text` of the whole sequence.

    A token's text depends on its neighbours: a character may be spread over several tokens, and SentencePiece drops the
    first space.  So a window is decoded, from the tokens shown last (the context) to the newest, and what the
    context accounts for is cut off.  Text that ends inside a character waits for the next token.

    The one exception to equality: with byte-fallback vocabularies, a run of over 16 byte tokens that is not UTF-8
    decodes as a whole to replacement characters, and by then its beginning has been shown.

    Args:
        shown: special tokens that are shown as they are written in the vocabulary.
    """

    def __init__(self, tokenizer: Any, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._marks = {index: str(tokenizer.convert_ids_to_tokens(index)) for index in shown}
        added = tokenizer.added_tokens_decoder.items()
        is_fast = getattr(tokenizer, "is_fast", False)
        self._skipped = {index for index, token in added if token.special} if is_fast else {*tokenizer.all_special_ids}
        """What decoding leaves out: every special token of the vocabulary, declared or added."""
        spelled = range(256) if token_id(tokenizer, "<0x00>") is not None else ()
        self._byte_ids = {token_id(tokenizer, f"<0x{byte:02X}>") for byte in spelled}
        """Of byte-fallback tokens (`<0x00>`, ...), which become text only as a whole run."""
        self._window: list[int] = []
        self._shown = 0
        """How many tokens of the window are context; `_context` is their text."""
        self._context = ""

    def feed(self, token_id: int) -> str:
        """Text that this token completes; empty if it completes none."""
        if token_id in self._marks:
            return self.flush() + self._marks[token_id]
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        full = len(self._window) - self._shown >= _MOST_HELD
        if token_id in self._byte_ids and not full:
            return ""
        text = decode_text(self._tokenizer, self._window)
        if not text.endswith(_REPLACEMENT):
            return self._show(text, len(self._window))
        return self._show_whole_characters(text) if full else ""

    def flush(self) -> str:
        """What is held back: an incomplete character appears as a replacement character."""
        if len(self._window) == self._shown:
            return ""
        return self._show(decode_text(self._tokenizer, self._window), len(self._window))

    def _show_whole_characters(self, text: str) -> str:
        """Shows a window that has grown too long, but for the bytes of a character that has just begun."""
        for end in range(len(self._window) - 1, len(self._window) - 4, -1):
            shorter = decode_text(self._tokenizer, self._window[:end])
            if not shorter.endswith(_REPLACEMENT):
                return self._show(shorter, end)
        return self._show(text, len(self._window))

    def _show(self, text: str, end: int) -> str:
        """Makes the first `end` tokens of the window, whose text this is, its context; the text that is new."""
        new = text[len(self._context) :]
        fresh = self._window[self._shown : end]
        context = decode_text(self._tokenizer, fresh)
        if context:
            self._window, self._context = self._window[self._shown :], context
            self._shown = len(fresh)
        else:
            # Tokens without text (a lone leading space) cannot stand for what came before them.
            self._context = text
            self._shown = end
        return new
