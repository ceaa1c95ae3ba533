"""Qwen3-Omni: the part that reads and writes text (its thinker) is a model of its own; the rest speaks."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from engine.runtime.adapters import Adapter


class Qwen3OmniAdapter(Adapter):
    """Builds the thinker alone: its tensors are those whose names begin with its own prefix, `thinker.`."""

    def model_class(self, config: Any) -> type | None:  # noqa: ARG002 - others look at it
        """The thinker."""
        thinker: type = Qwen3OmniMoeThinkerForConditionalGeneration
        return thinker

    def prepare(self, model: Any) -> None:
        """Its experts are everyone's."""


ADAPTER = Qwen3OmniAdapter()
