"""DuoServe's predictor (section 4): popularity and affinity matrices, the state built from them, and the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.experts.replay import RoutingTrace

WIDTHS = (2048, 1024, 512, 256, 128, 64)
"""Widths of the hidden layers; seven layers with the output."""
DROPOUT = 0.1


@dataclass(frozen=True)
class RoutingStatistics:
    """Statistics of a model's routing in a trace.

    Attributes:
        distance: layers from the last known one to the predicted one; 1 in the paper.
        popularity: fp32 [L, E], eq. 2: P_l(i), the share of layer l's choices that were expert i.
        affinity: fp32 [L - distance, E, E], eq. 3: A_l(i, j), the share of j among the choices in layer l + distance
            of tokens that chose i in layer l.  Rows of experts that were never chosen are 0.
    """

    distance: int
    popularity: torch.Tensor
    affinity: torch.Tensor

    @classmethod
    def of(cls, trace: RoutingTrace, distance: int) -> RoutingStatistics:
        """Computes the statistics of a trace."""
        layers, experts = trace.layers, trace.num_experts
        popularity = torch.zeros(layers, experts)
        affinity = torch.zeros(max(0, layers - distance), experts, experts)
        before = [_multi_hot(trace.experts[:, layer], experts) for layer in range(min(distance, layers))]
        for layer in range(layers):
            chosen = before[layer] if layer < len(before) else _multi_hot(trace.experts[:, layer], experts)
            if layer >= len(before):
                before.append(chosen)
            popularity[layer] = _shares(chosen.sum(0))
            if layer >= distance:
                affinity[layer - distance] = _shares(before[layer - distance].T @ chosen)
                before[layer - distance] = torch.zeros(0)  # not needed again
        return cls(distance, popularity, affinity)

    @property
    def layers(self) -> int:
        return int(self.popularity.shape[0])

    @property
    def experts(self) -> int:
        return int(self.popularity.shape[1])

    def surroundings(self, layer: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The part of the state other than the path: [B, 2E].

        Popularity of the predicted layer's experts, and their mean affinity to the experts chosen in this layer; both
        as multiples of a uniform share, so that they are of the order of 1.

        Args:
            layer: [B], the last known layer.
            chosen: [B, k], its experts, -1 for none.
        """
        real = (chosen >= 0).float()
        rows = self.affinity[layer[:, None], chosen.clamp(min=0)]
        affinity = (rows * real[:, :, None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        return torch.cat([self.popularity[layer + self.distance], affinity], dim=1) * self.experts


class ExpertMlp(nn.Module):
    """State -> a logit for each expert of the predicted layer.

    The path so far is a set of (layer, expert) pairs, one input each.  The first layer sums their embeddings, so the
    cost depends only on the number of pairs, and only their list needs padding.

    Args:
        layers, experts: of the model.
        widths: of the hidden layers.
    """

    def __init__(self, layers: int, experts: int, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.padding = layers * experts
        self.path = nn.EmbeddingBag(layers * experts + 1, widths[0], mode="sum", padding_idx=self.padding)
        nn.init.uniform_(self.path.weight, -0.05, 0.05)
        with torch.no_grad():
            self.path.weight[self.padding] = 0
        self.surroundings = nn.Linear(2 * experts, widths[0])
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(widths[-1], experts)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, path: torch.Tensor, surroundings: torch.Tensor) -> torch.Tensor:
        """path: int64 [B, any], layer * E + expert, padded with `padding`; surroundings: [B, 2E] -> [B, E]."""
        state = self.path(path) + self.surroundings(surroundings)
        for index, norm in enumerate(self.norms):
            state = self.dropout(torch.relu(norm(state)))
            if index < len(self.hidden):
                state = self.hidden[index](state)
        logits: torch.Tensor = self.out(state)
        return logits


def _multi_hot(chosen: NDArray[np.int16], experts: int) -> torch.Tensor:
    """int [T, k] with -1 for none -> fp32 [T, E]."""
    index = torch.from_numpy(chosen.astype(np.int64))
    marks = torch.zeros(len(index), experts + 1)
    marks.scatter_(1, torch.where(index < 0, experts, index), 1.0)
    return marks[:, :experts]


def _shares(counts: torch.Tensor) -> torch.Tensor:
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)
