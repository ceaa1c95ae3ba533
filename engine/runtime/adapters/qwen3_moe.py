"""Qwen3 with other senses than text, whose experts are everyone's."""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig

from engine.runtime.adapters import Adapter


class Qwen3OmniAdapter(Adapter):
    """Builds what reads and writes text, its thinker, alone: its tensors are those whose names begin with its own
    prefix, `thinker.`; the rest speaks."""

    def model_class(self, config: Any) -> type | None:  # noqa: ARG002 - others look at it
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

        thinker: type = modeling_qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration
        return thinker


class Qwen3VLMoeAdapter(Adapter):
    """Adds the conversions of Qwen3's text model, as GGUF files have experts one by one: the library knows stacks."""

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        return [*library, *get_checkpoint_conversion_mapping(Qwen2MoeConfig.model_type)]
