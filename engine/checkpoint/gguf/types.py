"""The number formats of GGUF files by their numbers there, and the names of those that are not read."""

from __future__ import annotations

from engine.formats.ggml import GGML, TYPES, BlockType

__all__ = ["BLOCK_TYPES", "BY_NAME", "WHOLE", "BlockType", "unread_type"]

WHOLE = BlockType("I32", "", 26, 1, 4)
"""Of tables that are no weights."""
BLOCK_TYPES = {each.id: each for each in TYPES}
"""Those of weights, by their number in files."""
BY_NAME = GGML
"""By name."""
_UNREAD = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_DROPPED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
_IK_LLAMA_CPP = {
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K",
    144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT",
    156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
_IK_LLAMA_CPP_FROM = 137


def unread_type(number: int) -> str:
    """What a type is, in words, that is not among `BLOCK_TYPES`: ggml's, one of a program beside it, or a newer one."""
    if number in _UNREAD:
        return _UNREAD[number]
    if number in _DROPPED:
        return f"{_DROPPED[number]} (which llama.cpp no longer has)"
    if number in _IK_LLAMA_CPP or number >= _IK_LLAMA_CPP_FROM:
        return f"{_IK_LLAMA_CPP.get(number, f'type {number}')} (ik_llama.cpp's own)"
    return f"type {number} (a new one, or another program's own)"
