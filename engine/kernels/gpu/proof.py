"""Tests once whether a card runs the Triton kernels, with a small problem of each kind."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch

from engine.formats import BF16, FORMATS, TiledFormat, WeightFormat
from engine.formats.tiles import Pairing, TiledMatrix, dequantise
from engine.kernels.activation import Activation, ActivationKind
from engine.kernels.quantise import quantise

_log = logging.getLogger(__name__)

_OLDEST = (8, 0)
"""Compute capability of NVIDIA's first cards with bf16 matrix units."""


def runs_kernels(device: torch.device) -> bool:
    """Whether experts and linear layers on this device are computed by the kernels of this package."""
    return why_not(device) is None


def why_not(device: torch.device) -> str | None:
    """Why the kernels do not run on a device, in a few words; `None` if they do."""
    if device.type != "cuda":
        return "it is not a graphics card"
    return _why_not(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _why_not(index: int) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    device = torch.device("cuda", index)
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST:
        return f"its compute capability is {capability[0]}.{capability[1]}, below {_OLDEST[0]}.{_OLDEST[1]}"
    try:
        with torch.inference_mode():
            failed = prove(device)
    except Exception as error:  # any compiler or driver error: fall back to torch's operators
        _log.warning("Triton's kernels do not run on cuda:%d", index, exc_info=True)
        return f"Triton failed ({type(error).__name__})"
    if failed is not None:
        _log.warning("Triton's kernels compute %s wrongly on cuda:%d", failed, index)
        return f"Triton's kernels compute {failed} wrongly"
    return None


def prove(device: torch.device) -> str | None:
    """Compares results with the reference; returns the first kind that is wrong."""
    for each in FORMATS.values():
        if each is BF16 or (each.on_card and each.is_tiled):
            for visits in (3, 40):
                if not _is_right(each, visits, device):
                    return each.name
    return None


def _is_right(of_weights: WeightFormat, visits: int, device: torch.device) -> bool:
    from engine.kernels.gpu.products import multiply_groups, multiply_visits
    from engine.kernels.gpu.stored import RecordTable, StoredMatrix, group, store

    rows, columns = 96, 160
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).bfloat16()
    x = torch.randn(visits, columns, generator=generator).bfloat16()
    activation = Activation(ActivationKind.SILU, Pairing.HALVES)
    if not isinstance(of_weights, TiledFormat):
        record = weight.view(torch.uint8).reshape(1, -1).to(device)
        matrix, meant = StoredMatrix(rows, columns, torch.bfloat16, None, Pairing.HALVES, 0), weight
    else:
        tiles: TiledMatrix = quantise(weight, of_weights, Pairing.HALVES)
        meant = dequantise(tiles)
        record, matrix = store(tiles, None, device)
    table = RecordTable([record])
    ids = torch.zeros(visits, dtype=torch.int64, device=device)
    if visits < 16:
        out = multiply_visits(matrix, table, x.to(device), ids, 1, activation)
    else:
        out = multiply_groups(matrix, table, x.to(device), visits, group(ids, 1, 16), 16, 1, activation)
    gate, up = (x.float() @ meant.float().T).chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    return bool(torch.allclose(out.float().cpu(), wanted, rtol=0.05, atol=0.05))
