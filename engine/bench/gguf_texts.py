"""The texts of a checkpoint's tokens in a GGUF file: programs that answer in text need them."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import TokenType

from engine.checkpoint.gguf.export import Metadata
from engine.common.errors import EngineError, ErrorCode

_MERGED = "\u0120\u0120"
"""Two spaces: llama.cpp asks for one merge at least."""


def texts_of(checkpoint: Path) -> Metadata:
    """The vocabulary, the merges and the chat template of a checkpoint whose tokens are made of bytes.

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
    found: Metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if at in special else TokenType.NORMAL) for at in range(len(tokens))
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if settings.get(name) in tokens:
            found[f"tokenizer.ggml.{key}_token_id"] = tokens.index(settings[name])
    if settings.get("chat_template"):
        found["tokenizer.chat_template"] = settings["chat_template"]
    return found
