"""JetMoE: experts in the MLP and in the attention, where each is a pair of query and output projections."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear
from transformers.core_model_loading import WeightRenaming
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoA, JetMoeMoE, JetMoeTopKGating

from engine.experts.dispatch import StandardExperts, bank_layer
from engine.runtime.adapters import Adapter

_RENAMED = {
    "mlp.input_linear.weight": "mlp.experts.gate_up_proj",
    "mlp.output_linear.weight": "mlp.experts.down_proj",
    "self_attention.experts.input_linear.weight": "self_attention.experts.projections.q_proj",
    "self_attention.experts.output_linear.weight": "self_attention.experts.projections.o_proj",
}


class Gate(JetMoeTopKGating):  # type: ignore[misc]  # the library is untyped
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> router logits [T, E], weights [T, k], index [T, k]."""
        logits = self.layer(hidden_states).float()
        chosen, index = logits.topk(self.top_k, dim=1)
        return logits, torch.softmax(chosen, dim=1).type_as(hidden_states), index


class Mlp(JetMoeMoE):  # type: ignore[misc]  # the library is untyped
    def forward(self, layer_input: torch.Tensor) -> torch.Tensor:
        flat = layer_input.reshape(-1, self.input_size)
        _, weights, index = self.router(flat)
        routed: torch.Tensor = self.experts(flat, index, weights)
        bias: torch.Tensor = self.bias
        return routed.view(layer_input.shape) + bias


class Projections(torch.nn.Module):
    """The attention's experts: each a query and an output projection.

    Attributes:
        q_proj: [E, D, H]; D is the width of all key-value heads together.
        o_proj: [E, H, D].
    """

    expert_parts = ("q_proj", "o_proj")

    def __init__(self, num_experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.q_proj = torch.nn.Parameter(torch.empty(num_experts, width, hidden), requires_grad=False)
        self.o_proj = torch.nn.Parameter(torch.empty(num_experts, hidden, width), requires_grad=False)

    def forward(self, part: str, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Each row through the projection of its expert: rows [N, in], experts [N] -> [N, out]."""
        layer = bank_layer(self)
        inputs = rows.to(layer.device)
        order = experts.to(layer.device).argsort(stable=True)
        counts = torch.bincount(experts, minlength=self.num_experts).tolist()
        grouped = [
            linear(group, layer.part(part, expert))
            for expert, group in enumerate(torch.split(inputs[order], counts))
            if counts[expert]
        ]
        together = torch.cat(grouped)
        return torch.empty_like(together).index_copy_(0, order, together).to(rows.device)


class JetMoeAttention(JetMoeMoA):  # type: ignore[misc]  # the library is untyped
    def map(self, layer_input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """[B, S, H] -> queries [B, S, k, D], router logits, and what `reduce` needs to know."""
        flat = layer_input.reshape(-1, self.input_size)
        logits, weights, index = self.router(flat)
        queries = self.projections("q_proj", flat.repeat_interleave(self.top_k, dim=0), index.flatten())
        return queries.view(*layer_input.shape[:2], self.top_k, -1), logits, (index, weights)

    def reduce(self, layer_input: torch.Tensor, topo_info: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[B, S, k, D] -> [B, S, H]."""
        index, weights = topo_info
        out = self.projections("o_proj", layer_input.reshape(-1, self.hidden_size), index.flatten())
        merged: torch.Tensor = (out.view(*index.shape, -1) * weights[..., None]).sum(dim=1)
        bias: torch.Tensor = self.bias
        return merged.view(*layer_input.shape[:2], -1) + bias


class JetMoeAdapter(Adapter):
    def prepare(self, model: Any) -> None:
        for module in list(model.modules()):
            if isinstance(module, JetMoeTopKGating):
                module.__class__ = Gate
            elif isinstance(module, JetMoeMoE):
                experts = module.input_linear.num_experts
                _drop_linears(module)
                module.experts = StandardExperts(experts, module.input_size, module.hidden_size, module.activation)
                module.__class__ = Mlp
            elif isinstance(module, JetMoeMoA):
                _drop_linears(module)
                module.projections = Projections(module.num_experts, module.input_size, module.hidden_size)
                module.__class__ = JetMoeAttention

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        return [*library, *(WeightRenaming(source, target) for source, target in _RENAMED.items())]


def _drop_linears(module: torch.nn.Module) -> None:
    del module.input_linear
    del module.output_linear
