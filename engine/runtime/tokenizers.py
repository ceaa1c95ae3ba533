"""Loads a checkpoint's tokenizer, from its own folder and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from engine.errors import EngineError, ErrorCode
from engine.runtime.library_models import quiet_library

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip


def load_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer of the checkpoint in `directory`.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if it is missing or broken.
    """
    if not any((directory / name).is_file() for name in _FILES):
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{directory} has no tokenizer (tokenizer.json), so text cannot be read or written: "
            "download or copy the whole model again.",
        )
    try:
        with quiet_library():
            return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever the broken file made it stumble over
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The tokenizer in {directory} cannot be read: download or copy its tokenizer files again.",
        ) from error
