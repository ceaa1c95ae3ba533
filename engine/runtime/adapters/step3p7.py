"""Step 3.7: experts in the standard layout, which the library does not send through its interface."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import Concatenate, WeightConverter
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from engine.experts.dispatch import experts_forward
from engine.runtime.adapters import Adapter


class Step3p7BankExperts(Step3p7Experts):  # type: ignore[misc]  # the library is untyped
    """The family's experts with the attributes of the interface; `_apply_gate`, which clamps, stays its own."""

    expert_parts = ("gate_up_proj", "down_proj")
    has_gate = True
    has_bias = is_transposed = has_post_expert_norm = False

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class Step3p7Adapter(Adapter):
    def prepare(self, model: Any) -> None:
        for module in list(model.modules()):
            if isinstance(module, Step3p7Experts):
                module.__class__ = Step3p7BankExperts

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        """The library's, which merely rename down_proj: as a conversion it takes up the scales of FP8 checkpoints."""
        kept = [entry for entry in library if not any("moe\\.down_proj" in source for source in entry.source_patterns)]
        return [*kept, WeightConverter("moe.down_proj.weight", "mlp.experts.down_proj", [Concatenate(dim=1)])]
