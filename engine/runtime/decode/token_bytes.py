"""The bytes of single tokens, of which some are only part of a character."""

from __future__ import annotations

import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that byte-level vocabularies write as the character of the same number; the others follow from 256 on (Radford
et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2)."""
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """What a token adds to the text, in UTF-8, also where that is no whole character."""
    text = str(tokenizer.decode([token]))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode("utf-8")
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return text.encode("utf-8")
