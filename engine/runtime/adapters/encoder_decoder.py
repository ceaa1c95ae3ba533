"""What the encoder-decoder families share: each expert is two `Linear`s of its own, `experts.expert_3.wi.weight`."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from engine.runtime.adapters import Adapter


class EncoderDecoderAdapter(Adapter):
    """Builds the family's text-to-text class and stacks its experts.

    `expert_tensors`: name within an expert (`wi.weight`) -> part (`up_proj`).
    """

    expert_tensors: ClassVar[dict[str, str]]

    def model_class(self, config: Any) -> type | None:
        """The class that writes a text from a text."""
        chosen: type = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
        return chosen

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        """See `FamilyAdapter`."""
        stacked = [
            WeightConverter(f"experts.expert_*.{name}", f"experts.{part}", [MergeModulelist(dim=0)])
            for name, part in self.expert_tensors.items()
        ]
        return [*library, *stacked]
