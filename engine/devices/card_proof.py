"""Whether the installed torch computes on each graphics card; in a process of its own, as a bad driver may end it.

python -m engine.devices.card_proof
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.common.paths import python_module

if TYPE_CHECKING:
    from engine.devices.card import CardKind

_WITHIN_S = 180.0
"""The first start of a driver, with torch on a slow disk."""


@dataclass(frozen=True, slots=True)
class CardProof:
    """The outcome for one card: `failed` says in a few words why it did not compute; empty if it did."""

    name: str
    failed: str = ""


def prove_cards() -> list[CardProof] | None:
    """Computes a little on each card that torch sees; `None` if that could not be tried."""
    command, variables = python_module("engine.devices.card_proof")
    try:
        child = subprocess.run(command, capture_output=True, timeout=_WITHIN_S, check=True, env=os.environ | variables)
        return [CardProof(str(name), str(failed)) for name, failed in json.loads(child.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return None


def _prove(kind: CardKind, index: int) -> CardProof:
    import torch

    name = f"card {index}"
    try:
        name = kind.torch.get_device_name(index)
        numbers = torch.arange(256, dtype=torch.float32, device=torch.device(kind.name, index))
        computed = float((numbers.view(16, 16) @ torch.ones(16, 16, device=numbers.device)).sum())
    except Exception as error:  # whatever a driver says
        first = str(error).strip().splitlines()
        said = first[0].removeprefix("CUDA error: ") if first else type(error).__name__
        if "no kernel image" in said:
            said = f"this torch has kernels for {', '.join(kind.torch.get_arch_list())} only"
        return CardProof(name, said.rstrip("."))
    return CardProof(name, "" if computed == 16 * 255 * 128 else "it computed a wrong sum")


def main() -> int:
    """Prints a line of JSON: the name of each card, and why it failed."""
    from engine.devices.opening import CARD_KINDS

    proofs = [_prove(kind, index) for kind in CARD_KINDS.values() for index in range(kind.count())]
    sys.stdout.write(json.dumps([(each.name, each.failed) for each in proofs]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
