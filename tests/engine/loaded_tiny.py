"""Tiny random models wrapped as loaded ones, for generation without a checkpoint on disk; and checkpoints opened."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from engine.common.config import EngineConfig
from engine.common.errors import never_cancelled
from engine.common.model_info import ModelInfo
from engine.runtime.adapters.jamba import JambaAdapter
from engine.runtime.decode.generation import ignore_progress
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.engine.tiny_families import output_embeddings, tiny_model
from tests.engine.tiny_tokenizer import TEMPLATE, save_tiny_tokenizer

NO_END: frozenset[int] = frozenset()


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
        model=model,
        tokenizer=tiny_tokenizer() if tokenizer is None else tokenizer,
        info=info,
        bank=None,
        context_tokens=context_tokens,
        device=torch.device("cpu"),
    )


def open_model(model: EngineConfig | Path | str, precision: Any = "bf16", **settings: Any) -> LoadedModel:
    """Opens a checkpoint as users do: by its settings, or by its folder on one thread of the CPU."""
    if not isinstance(model, EngineConfig):
        model = EngineConfig(str(model), **{"device": "cpu", "precision": precision, "threads": 1, **settings})
    return load_model(model, on_progress=ignore_progress, cancelled=never_cancelled)


@contextmanager
def opened_model(model: EngineConfig | Path | str, precision: Any = "bf16", **settings: Any) -> Iterator[LoadedModel]:
    """`open_model`, closed at the end."""
    loaded = open_model(model, precision, **settings)
    try:
        yield loaded
    finally:
        loaded.close()


def spread(model: Any) -> None:
    """Moves logits so far apart that rounding does not decide which token is the likeliest."""
    with torch.no_grad():
        output_embeddings(model).weight.mul_(40)


def tiny_loaded(family: str, *, context_tokens: int = 256, **overrides: Any) -> LoadedModel:
    """The family's tiny model, its experts in the module, ready for a session.

    Its logits are spread out, so that rounding does not decide which token is the likeliest; for the same reason an
    index of the most important tokens, whose scores are often equally zero in tiny models, keeps them all.
    """
    model = tiny_model(family, drawn={"index_topk": overrides.get("index_topk", 256)}, **overrides)
    if family == "jamba":
        JambaAdapter().prepare(model)
    spread(model)
    return as_loaded(model, context_tokens=context_tokens)


def random_prompt(tokens: int, seed: int = 1) -> list[int]:
    """Ordinary token ids of the tiny tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    return [int(index) for index in torch.randint(3, 300, (tokens,), generator=generator)]


def library_tokens(model: Any, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    """What transformers' own `generate` continues the prompt with; greedy and without an end token by default."""
    ids = torch.tensor([list(prompt)])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": tokens, **options}
    with torch.inference_mode():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return [int(index) for index in answer[0, len(prompt) :]]
