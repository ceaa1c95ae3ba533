"""What a checkpoint holds: a model without weights that says which it wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.config_file import read_config, unread_inputs
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.names import name_of
from engine.checkpoint.pictures import is_of_tower, seeing_part, why_blind, why_gguf_is_blind
from engine.checkpoint.profile import ModelProfile, profile_of
from engine.checkpoint.quantised import left_out_note
from engine.checkpoint.shards import check_filled, content_digest, read_tensors
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.experts.dispatch import ExpertsSite, find_sites
from engine.families.pictures import SIGHTS
from engine.formats import PRECISIONS, as_stored
from engine.runtime.adapters import adapter_for
from engine.runtime.draft_head import add_draft_head, draft_head_of
from engine.runtime.load.devices import ModelDevices
from engine.runtime.load.library_conversion import LoadingPlan, parameter_dtypes, plan_loading
from engine.runtime.load.library_models import (
    build_beside,
    build_skeleton,
    count_weights,
    finish_generation_config,
    leave_out_tower,
    model_class_for,
    quantizer_for,
    read_library_config,
    tied_to,
)
from engine.runtime.pictures import Sight, open_tower

_UNKNOWN_CONTEXT = 32_768
"""For models that set themselves no limit (state-space models, say)."""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint of which nothing but headers has been read.

    Attributes:
        model: on the meta device.
        unread: other inputs of the model than text, which are not supported, in words; may be empty.
        sight: makes what sees, of the tokenizer, the place of embeddings and cards; None for one that reads text only.
        tower_weights: how many weights what sees has.
        why_blind: why it reads text only, completing a sentence.
        left_out: a sentence about what the checkpoint wants quantised besides weights; may be empty.
        guesses: whether the model has the layer that guesses tokens.
    """

    directory: Path
    profile: ModelProfile
    model: Any
    sites: list[ExpertsSite]
    plan: LoadingPlan
    dtype: torch.dtype
    weights: int
    unread: str
    left_out: str
    guesses: bool = False
    sight: Callable[[Any, torch.device, ModelDevices | None], Sight] | None = None
    why_blind: str = ""
    tower_weights: int = 0

    @property
    def name(self) -> str:
        return name_of(self.directory)

    @property
    def key(self) -> str:
        return content_digest(self.directory)

    def weight_of(self, module: str) -> TensorEntry | None:
        """The tensor that is the weight of a module as it is, be it the embedding's that an output layer shares."""
        weight, renamed = f"{module}.weight", self.plan.renamed
        if self.plan.quantizer is not None:  # which has a use of its own for it
            return None
        return renamed.get(weight) or renamed.get(tied_to(self.model).get(weight, ""))

    def context_tokens(self, asked: int | None) -> int:
        own = self.profile.context_tokens or _UNKNOWN_CONTEXT
        return min(own, asked or own)


def open_checkpoint(config: EngineConfig, *, guesses: bool = False) -> OpenedCheckpoint:
    """Reads headers of `config.model`, but not its tokenizer, and builds the model on the meta device; with the layer
    that guesses tokens if it has one and `guesses`."""
    if config.precision not in PRECISIONS:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"There is no precision '{config.precision}': choose from {', '.join(PRECISIONS)}.",
        )
    directory = Path(config.model)
    opened = read_headers(directory, config.precision, guesses=guesses)
    finish_generation_config(opened.model, directory)
    return opened


def read_headers(directory: Path, precision: str, *, guesses: bool = False) -> OpenedCheckpoint:
    dtype = getattr(torch, as_stored(precision).dtype)
    raw = read_config(directory)
    library_config = read_library_config(directory, raw)
    adapter = adapter_for(raw["model_type"])
    model_class, part = model_class_for(library_config, adapter)
    tensors = read_tensors(directory, guesses=guesses)
    check_filled(tensors.values())
    profile = profile_of(raw, tensors.values())
    why = why_gguf_is_blind(directory) or why_blind(raw, tensors)
    quantizer = quantizer_for(part)
    model = build_skeleton(model_class, part, dtype, adapter)
    sight, tower_weights = None, 0
    is_whole = seeing_part(raw)["model_type"] in SIGHTS and leave_out_tower(model)
    if not why:
        tower_weights = sum(entry.numel for key, entry in tensors.items() if is_of_tower(key))
        sees = getattr(library_config, "thinker_config", library_config)
        tower = partial(open_tower, sees, tensors, dtype, quantizer, adapter)
        sight = partial(Sight, directory, raw, sees, tower, is_whole=is_whole)
        tensors = {key: entry for key, entry in tensors.items() if not is_of_tower(key)}
    if guesses:
        tensors = add_draft_head(model, tensors, lambda make: build_beside(model, dtype, make))
    sites = find_sites(model, parameter_dtypes(model, dtype))
    weights = count_weights(model)
    plan = plan_loading(model, sites, tensors, dtype, quantizer, adapter)
    left_out = left_out_note(directory, raw)
    unread, has_head = unread_inputs(raw, sees=not why), draft_head_of(model) is not None
    return OpenedCheckpoint(
        directory, profile, model, sites, plan, dtype, weights, unread, left_out, has_head, sight, why, tower_weights
    )
