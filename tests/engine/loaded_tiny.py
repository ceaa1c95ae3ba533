"""Tiny random models wrapped as loaded ones: generation without a checkpoint on disk."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from engine.protocol import ModelInfo
from engine.runtime.loaded_model import LoadedModel
from tests.engine.tiny_families import tiny_model
from tests.engine.tiny_tokenizer import TEMPLATE, save_tiny_tokenizer


@cache
def tiny_tokenizer(template: str | None = TEMPLATE) -> Any:
    """The tests' byte-level tokenizer, read back as users read theirs."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_tokenizer(Path(folder), template=template)
        return AutoTokenizer.from_pretrained(folder)


def as_loaded(model: Any, tokenizer: Any = None, context_tokens: int = 256) -> LoadedModel:
    """A transformers model and a tokenizer as what `load_model` returns."""
    info = ModelInfo("tiny", "", model.config.model_type, "cpu", "fp32", 1, 0, 2, 0, 0, context_tokens, 0, 0, 0)
    return LoadedModel(
        model, tiny_tokenizer() if tokenizer is None else tokenizer, info, None, context_tokens, torch.device("cpu")
    )


def tiny_loaded(family: str, *, context_tokens: int = 256, **overrides: Any) -> LoadedModel:
    """The family's tiny model, its experts in the module, ready for a session."""
    return as_loaded(tiny_model(family, **overrides), context_tokens=context_tokens)
