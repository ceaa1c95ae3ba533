"""Whether a model's layers take the tokens of many rows as one sequence."""

from __future__ import annotations

import sys
from typing import Any

from engine.families import family_of
from engine.runtime.rotary import kinds_by_length
from engine.runtime.window_masks import window_of_cache_alone


def why_not_packed(model: Any) -> str:
    """Why rows cannot go through this model's layers without padding, as the end of a sentence; empty if they can."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False) or not family_of(config.model_type).packs_rows:
        return f"layers of the {config.model_type} family do not take several at once"
    kinds = sorted(kinds_by_length(model))
    if kinds:
        return f"this model's rotary embedding ({', '.join(kinds)}) depends on the length of each row"
    if window_of_cache_alone(model) < sys.maxsize:
        return "this model's sliding window is one of its cache, and not of its attention"
    return ""


def can_pack(model: Any) -> bool:
    """Whether rows can go through this model's layers without padding."""
    return not why_not_packed(model)
