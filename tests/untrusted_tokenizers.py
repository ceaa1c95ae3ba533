"""Tokenizers that somebody made to do harm."""

import json
from pathlib import Path
from typing import Any

SLOW_TEXT = ("a" * 1_500 + " ") * 400
"""A tokenizer of `write_slow_tokenizer` takes an hour for this."""
PANIC_TEXT = "a" * 60 + "!"
"""One of `write_panicking_tokenizer` gives up on this, with what is no `Exception`."""


def write_tokenizer(folder: Path, **parts: Any) -> None:
    """A tokenizer.json that knows two words, with these parts."""
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"},
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


def write_slow_tokenizer(folder: Path) -> None:
    """Its regular expression tries every way to divide a text in two."""
    write_tokenizer(folder, pre_tokenizer=split_by("a+a+(?:b|c)"))


def write_panicking_tokenizer(folder: Path) -> None:
    """Its regular expression tries more ways than the library has patience for."""
    write_tokenizer(folder, pre_tokenizer=split_by("(?:a|aa)+$"))


def write_multiplying_tokenizer(folder: Path, times: int = 12) -> None:
    """Its normaliser makes of every `e` ten, `times` over."""
    replace = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 10}
    write_tokenizer(folder, normalizer={"type": "Sequence", "normalizers": [replace] * times})


def split_by(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer that splits where a regular expression matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
