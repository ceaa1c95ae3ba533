"""The parent's tokenizer, rebuilt from the GGUF metadata with the ids of the original."""

from __future__ import annotations

import json
from pathlib import Path

from engine.checkpoint.starter.parent import DenseParent
from engine.checkpoint.starter.recipe import Dimensions

_CONTROL = 3
"""`LLAMA_TOKEN_TYPE_CONTROL` in llama.cpp: a special token, never produced by text unless written out in full."""


def write_tokenizer(folder: Path, parent: DenseParent, dimensions: Dimensions) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template).

    SmolLM2 is a byte-level BPE that splits every digit off first (`tokenizer.ggml.pre` = "smollm").

    Raises:
        ValueError: if the file describes another kind of tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (parent.metadata("tokenizer.ggml.model"), parent.metadata("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"expected the tokenizer ('gpt2', 'smollm'), found {kind}")
    tokens: list[str] = parent.metadata("tokenizer.ggml.tokens")
    types: list[int] = parent.metadata("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in parent.metadata("tokenizer.ggml.merges")]

    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind_of in zip(tokens, types, strict=True) if kind_of == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        # Not "GPT2Tokenizer": transformers would rebuild that one without the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": dimensions.positions,
        "bos_token": tokens[dimensions.bos_token_id],
        "eos_token": tokens[dimensions.eos_token_id],
        "pad_token": tokens[dimensions.pad_token_id],
        "unk_token": tokens[0],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": parent.metadata("tokenizer.chat_template"),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
