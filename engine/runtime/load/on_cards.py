"""What the modules of a model on a card compute by kernels in CUDA C besides products and attention."""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine.kernels.gpu.angles import speed_up_angles
from engine.kernels.gpu.latents import speed_up_latents
from engine.kernels.gpu.layers import speed_up_layers
from engine.kernels.gpu.norms import speed_up_norms
from engine.kernels.gpu.rotations import TRIED_POSITIONS, speed_up_rotations
from engine.kernels.gpu.routers import speed_up_routers
from engine.runtime.decoder_layers import decoder_layers

_log = logging.getLogger(__name__)


def speed_up_on_cards(model: Any) -> None:
    """Lets kernels compute norms, residual sums, angles, rotations, latent attention and routers, wherever they give
    what the library gives.

    Args:
        model: in eval mode, with its weights where they are to be.
    """
    norms = speed_up_norms(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is not None:
        speed_up_angles(rotary, model.dtype)

    def angles(hidden: torch.Tensor) -> Any:
        return None if rotary is None else rotary(hidden, torch.tensor([TRIED_POSITIONS], device=hidden.device))

    rotations = speed_up_rotations(model, angles) if rotary is not None else 0
    latents = speed_up_latents(model, angles) if rotary is not None else 0
    routers = speed_up_routers(model)
    layers = speed_up_layers(decoder_layers(model), getattr(decoder, "norm", None))
    _log.info(
        "kernels compute %d norms, %d rotations, %d latent attentions, %d routers, %d layers' sums",
        *(norms, rotations, latents, routers, layers),
    )
