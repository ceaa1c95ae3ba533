"""What `auto` precision is: the best one whose weights fit, decided from sizes before anything is loaded.

bf16 is what checkpoints are in; int8 costs next to nothing of a model's quality and int4 some of it; reading experts
from disk for every token costs most of the speed, so it comes after int4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.runtime.memory import gigabytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes in one precision.

    Attributes:
        precision: `bf16`, `int8` or `int4`.
        ram: bytes of RAM for all its weights that are held there, and for bringing them in.
    """

    precision: str
    ram: int


def choose_precision(footprints: Sequence[Footprint], usable: int) -> tuple[str, str]:
    """(precision, why it is not the first one): the first of `footprints` that fits `usable` bytes of RAM.

    Where none fits, the last one: of the experts that are read from disk then, the fewest bytes.

    Args:
        footprints: at least one, best quality first.
    """
    first = footprints[0]
    chosen = next((each for each in footprints if each.ram <= usable), footprints[-1])
    if chosen is first:
        return first.precision, ""
    return chosen.precision, (
        f"Weights are in {chosen.precision}, because {first.precision} needs {gigabytes(first.ram)} of RAM "
        f"and there is room for {gigabytes(max(usable, 0))}."
    )
