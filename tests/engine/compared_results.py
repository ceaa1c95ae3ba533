"""What the kernels of two processors, or of two instruction sets, give for the same random cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.kernels.native.library import Isa
from tests.engine.native_programs import run_program

_ROUNDS = 3
_NEAR_TIES = 0.1
"""Part of all routings that may differ: sums in another order round to another logit, and scores are often close."""

Results = list[tuple[str, np.ndarray]]


def results(*program: str | Path, isa: Isa, seed: int) -> Results:
    """What the program says that the kernels give: numbers, or the experts chosen."""
    done = run_program(*program, str(seed), str(_ROUNDS), str(int(isa)), timeout_s=900)
    assert done.returncode == 0, f"seed {seed}, {isa.name}: {done.stderr}"
    found = []
    for line in done.stdout.splitlines():
        name, _, digits = line.partition(" ")
        halves = np.frombuffer(bytes.fromhex(digits), dtype=">u2").astype(np.uint32)
        found.append((name, halves if name == "chosen" else (halves << 16).view(np.float32)))
    return found


def compare(got: Results, wanted: Results, where: str, *, only_numbers: bool = False) -> None:
    """Fails unless all are near each other, but for routings where experts are as good as each other.

    Args:
        only_numbers: leaves out what infinities and NaNs come of, which sets that round otherwise treat otherwise.
    """
    assert [name for name, _ in got] == [name for name, _ in wanted]
    routings, others = 0, 0
    same_experts = True
    for (name, mine), (_, theirs) in zip(got, wanted, strict=True):
        said = f"{where}, {name}"
        if name == "chosen":
            same_experts = np.array_equal(mine, theirs)
            routings, others = routings + 1, others + (not same_experts)
        elif name == "expanded":
            np.testing.assert_array_equal(mine, theirs, err_msg=said)
        elif only_numbers and not np.isfinite(theirs).all():
            continue
        elif name == "experts_in_blocks":  # one set rounds activations to 8 bits, the other weights to bf16
            assert np.linalg.norm(mine - theirs) <= 0.04 * np.linalg.norm(theirs), said
        elif name != "sparse" or same_experts:
            finite = theirs[np.isfinite(theirs)]
            size = float(np.abs(finite).max()) if finite.size else 0.0
            np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-2 * size + 1e-3, err_msg=said)
    assert others <= _NEAR_TIES * routings
