"""Records which experts every token chose: the traces that cache policies and predictors are judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.dispatch import BANK_LAYER
from engine.experts.replay import RoutingTrace, write_trace
from engine.kernels.interface import ExpertKernel
from engine.runtime.fast_path.decoder_layer import route_in_library
from engine.runtime.loaded_model import LoadedModel


class RoutingRecorder:
    """Records every routed layer of a loaded model from its creation on; `save` writes the trace.

    The native step, which does its own routing, is bypassed meanwhile: recording costs some
    speed, answers stay the same.

    Raises:
        EngineError: `INVALID_REQUEST`, if the model routes nothing.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._choices: list[list[torch.Tensor]] = []
        self._shares: list[list[torch.Tensor]] = []
        self._starts: list[int] = []
        self._experts = 0
        route_in_library(loaded.model)
        for module in loaded.model.modules():
            bound = module.__dict__.get(BANK_LAYER)
            if bound is None or bound[1] is None:  # a module with its own computation reports no routing
                continue
            layer, kernel = bound
            # Of a model that mixes kinds of layers, those with the most experts are the ones that matter.
            count = getattr(module, "num_experts", None)
            self._experts = max(self._experts, layer.num_experts if count is None else count)
            setattr(module, BANK_LAYER, (layer, _RecordingKernel(kernel, self._new_layer())))
        if not self._choices:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{loaded.info.name} has no experts whose routing could be recorded."
            )

    def begin_sequence(self) -> None:
        """What follows belongs to another conversation."""
        tokens = self._tokens()
        if not self._starts or self._starts[-1] != tokens:
            self._starts.append(tokens)

    def save(self, path: Path) -> int:
        """Writes the trace; returns how many tokens it holds.

        Raises:
            EngineError: `INVALID_REQUEST`, if nothing was recorded or the file cannot be written.
        """
        tokens = self._tokens()
        if not tokens:
            raise EngineError(ErrorCode.INVALID_REQUEST, "No token was generated, so there is no routing to record.")
        width = max(rows[0].shape[1] for rows in self._choices)
        experts = np.full((tokens, len(self._choices), width), -1, np.int16)
        weights = np.zeros(experts.shape, np.float16)
        for layer, (choices, shares) in enumerate(zip(self._choices, self._shares, strict=True)):
            chosen = torch.cat(choices)[:tokens].numpy()
            experts[:, layer, : chosen.shape[1]] = np.where(chosen < self._experts, chosen, -1)
            weights[:, layer, : chosen.shape[1]] = torch.cat(shares)[:tokens].numpy()
        starts = np.array([*(self._starts or [0]), tokens], np.int64)
        try:
            write_trace(RoutingTrace(experts, weights, starts, self._experts), path)
        except OSError as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"The routing cannot be written to {path}: {error.strerror or error}."
            ) from error
        return tokens

    def _new_layer(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self._choices.append([])
        self._shares.append([])
        return self._choices[-1], self._shares[-1]

    def _tokens(self) -> int:
        """Tokens that every layer has seen: a cancelled pass may have reached only the first ones."""
        return min(sum(rows.shape[0] for rows in choices) for choices in self._choices)


class _RecordingKernel:
    """A layer's kernel that records the experts it is called with."""

    def __init__(self, kernel: ExpertKernel, notes: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        self._kernel = kernel
        self._choices, self._shares = notes

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        # Copies: the library may reuse both.
        self._choices.append(top_k_index.to("cpu", torch.int64, copy=True))
        self._shares.append(top_k_weights.to("cpu", torch.float32, copy=True))
        return self._kernel(hidden_states, top_k_index, top_k_weights)
