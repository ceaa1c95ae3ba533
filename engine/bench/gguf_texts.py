"""The texts of a checkpoint's tokens in a GGUF file: programs that answer in text need them."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGUFWriter, TokenType

from engine.common.errors import EngineError, ErrorCode

_MERGED = "\u0120\u0120"
"""Two spaces: llama.cpp asks for one merge at least."""


def add_texts(writer: GGUFWriter, checkpoint: Path) -> None:
    """Writes the vocabulary, the merges and the chat template of a checkpoint whose tokens are made of bytes.

    Where there are no merges, the first made-up word becomes the result of the only one.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`: its tokenizer is of another kind.
    """
    content = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    if content["model"]["type"] != "BPE" or content["model"].get("byte_fallback"):
        words = "Its tokenizer is no byte-level BPE, the only kind that the benches write to GGUF: name a GGUF file."
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, words)
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    named = {**{at: text for text, at in content["model"]["vocab"].items()}, **special}
    tokens = [named.get(at, f"<unused {at}>") for at in range(max(named) + 1)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"].get("merges", ())]
    if not merges:
        words_at = (at for at, token in enumerate(tokens) if at not in special and len(token) > 1)
        tokens[next(words_at, -1)] = _MERGED
        merges = [" ".join(_MERGED)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(TokenType.CONTROL if at in special else TokenType.NORMAL) for at in range(len(tokens))])
    writer.add_token_merges(merges)
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if settings.get(name) in tokens:
            add(tokens.index(settings[name]))
    writer.add_add_bos_token(False)
    if settings.get("chat_template"):
        writer.add_chat_template(settings["chat_template"])
