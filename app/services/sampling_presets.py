"""What a chat samples with: its model's own settings, or a named preset."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path

from engine.checkpoint.suggested_sampling import suggested_sampling
from engine.common.config import SamplingParams
from engine.common.model_info import ModelInfo

ANSWER_TOKENS = 1024
"""Longest answer, unless the chat says otherwise."""
THINKING_TOKENS = 8192
"""The same of a model that thinks before it answers, which counts as well."""


class Preset(Enum):
    """Named sampling settings, all with a mild repetition penalty.  Values are in saved chats: never change one."""

    PRECISE = SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1, max_tokens=ANSWER_TOKENS)
    BALANCED = SamplingParams(temperature=0.4, top_p=0.95, repetition_penalty=1.1, max_tokens=ANSWER_TOKENS)
    CREATIVE = SamplingParams(temperature=0.7, top_p=0.95, min_p=0.05, repetition_penalty=1.1, max_tokens=ANSWER_TOKENS)

    def beside(self, own: SamplingParams) -> SamplingParams:
        """The preset with the loop guard and the longest answer of a model's own sampling, which it needs in every
        style."""
        return replace(
            self.value,
            max_tokens=own.max_tokens,
            dry_multiplier=own.dry_multiplier,
            dry_base=own.dry_base,
            dry_allowed_length=own.dry_allowed_length,
            dry_range=own.dry_range,
            dry_breakers=own.dry_breakers,
        )


def own_sampling(model: ModelInfo | None) -> SamplingParams:
    """What a model's makers suggest.

    Balanced if no model is known, or if none is suggested: greedy answers of small models loop.
    """
    suggested = suggested_sampling(Path(model.path)) if model is not None and model.path else SamplingParams()
    sampling = Preset.BALANCED.value if suggested.temperature == 0 else suggested
    return replace(sampling, max_tokens=THINKING_TOKENS if model is not None and model.thinks else ANSWER_TOKENS)


def suggests_nothing(own: SamplingParams) -> bool:
    """Whether a model's own sampling is ours, because its makers suggest none."""
    return replace(own, max_tokens=ANSWER_TOKENS) == Preset.BALANCED.value


def preset_of(sampling: SamplingParams, own: SamplingParams) -> Preset | None:
    """The preset with these settings, beside a model's own; None if they are the user's own."""
    return next((preset for preset in Preset if sampling in (preset.value, preset.beside(own))), None)
