"""A tokenizer for models with random weights: encodes any text byte by byte, and every id has a text."""

from __future__ import annotations

import json
from pathlib import Path

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` with `vocabulary` (at least 259) ids: 0 is padding, 1 begins
    and 2 ends a turn, then come the bytes and made-up words that only the model says.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocabulary < len(tokens):
        raise ValueError(f"a byte-level tokenizer has at least {len(tokens)} tokens")
    tokens += [f"\u0120w{index}" for index in range(vocabulary - len(tokens))]  # U+0120 is the byte-level space
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
