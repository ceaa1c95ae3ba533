"""Qwen3-VL with experts one by one, as its GGUF files have them: the library knows stacks alone."""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig

from engine.runtime.adapters import Adapter


class Qwen3VLMoeAdapter(Adapter):
    """Adds the conversions of Qwen3's text model, whose experts are the same."""

    def prepare(self, model: Any) -> None:
        """Nothing: its modules are the library's."""

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        return [*library, *get_checkpoint_conversion_mapping(Qwen2MoeConfig.model_type)]


ADAPTER = Qwen3VLMoeAdapter()
