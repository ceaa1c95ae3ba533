"""Switch Transformers: an encoder-decoder whose router chooses one expert, or none once that has its fill."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from engine.experts.dispatch import StandardExperts
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
        stacked = [
            WeightConverter(f"experts.expert_*.{name}", f"experts.{part}", [MergeModulelist(dim=0)])
            for name, part in self.expert_tensors.items()
        ]
        return [*library, *stacked]


class SwitchExperts(StandardExperts):
    """Takes the router's choice as the family's block hands it over."""

    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], one-hot [T, 1, E] (all zero for a token that its expert had no room for), [T, 1] -> [T, H]."""
        chosen = selected_experts.argmax(dim=-1)
        index = chosen.masked_fill(selected_experts.sum(dim=-1) == 0, self.num_experts)
        return super().forward(hidden_states, index, routing_weights)


class SwitchTransformersAdapter(EncoderDecoderAdapter):
    """Standard experts in the place of a dictionary of modules."""

    expert_tensors: ClassVar[dict[str, str]] = {"wi.weight": "up_proj", "wo.weight": "down_proj"}

    def prepare(self, model: Any) -> None:
        config = model.config
        for module in list(model.modules()):
            if isinstance(module, SwitchTransformersSparseMLP):
                act_fn = module.experts["expert_0"].act
                module.experts = SwitchExperts(config.num_experts, config.d_model, config.d_ff, act_fn, has_gate=False)
                module._is_hf_initialized = True  # the library's initialisation looks for the dictionary


ADAPTER = SwitchTransformersAdapter()
