"""Triton compiles the kernels down to machine code for cards that are not there.  `test_interpreter.py` runs this."""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ.get("SWITCHYARD_COMPILE_KERNELS") != "1":
    pytest.skip("only in a process of its own", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.formats import FORMATS, TiledFormat
from engine.kernels.gpu.kernels_plain import plain_by_group, plain_by_visit
from engine.kernels.gpu.kernels_tiled import tiled_by_group, tiled_by_visit
from engine.kernels.gpu.products import constants_of

AMPERE, ADA, HOPPER, BLACKWELL = (GPUTarget("cuda", arch, 32) for arch in (80, 89, 90, 120))
RDNA3, CDNA3 = GPUTarget("hip", "gfx1100", 32), GPUTarget("hip", "gfx942", 64)
SHARED_BYTES = {80: 163, 89: 99, 90: 227, 120: 99, "gfx1100": 64, "gfx942": 64}
"""KiB of a block, by architecture."""
TYPES = {
    "base": "*u8",
    "limit": "fp32",
    "alpha": "fp32",
    **dict.fromkeys(("x", "out"), "*bf16"),
    **dict.fromkeys(("ids", "table", "order", "block_expert", "block_begin", "group_end"), "*i64"),
}
TILED = [each for each in FORMATS.values() if isinstance(each, TiledFormat) and each.on_card]
SILU = {"PAIRING": 1, "HAS_BIAS": False, "KIND": 0, "HAS_LIMIT": False}
GPT_OSS = {"PAIRING": 2, "HAS_BIAS": True, "KIND": 5, "HAS_LIMIT": True}
DOWN = {"PAIRING": 0, "HAS_BIAS": True, "KIND": -1, "HAS_LIMIT": False}


def compiled(kernel: Any, target: GPUTarget, **constants: Any) -> Any:
    """As it is launched, with pointers and offsets at multiples of 16."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    even = {
        (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name] not in ("fp32", "constexpr")
    }
    return triton.compile(ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=even), target=target)


@pytest.mark.parametrize("target", [AMPERE, HOPPER, BLACKWELL, RDNA3], ids=lambda target: str(target.arch))
def test_one_by_one(target: GPUTarget) -> None:
    for after in (SILU, GPT_OSS, DOWN):
        compiled(plain_by_visit, target, **after, N=8, K=256)
        for of_weights in TILED:
            made = compiled(tiled_by_visit, target, **after, **constants_of(of_weights), WORDS=32)
            if target.backend == "cuda":
                # Weights are read 16 bytes at a time, and nothing spills.
                assert "ld.global.v4" in made.asm["ptx"]
                assert "st.local" not in made.asm["ptx"]


@pytest.mark.parametrize("target", [AMPERE, ADA, HOPPER, BLACKWELL, CDNA3], ids=lambda target: str(target.arch))
@pytest.mark.parametrize("m", [16, 64])
def test_in_blocks(m: int, target: GPUTarget) -> None:
    after = GPT_OSS if m == 64 else DOWN
    made = [
        compiled(plain_by_group, target, **after, DOT=tl.bfloat16, M=m, N=64, K=64),
    ]
    for of_weights in TILED:
        constants = constants_of(of_weights) | {"WORDS": 4 * of_weights.code_bits}
        made.append(compiled(tiled_by_group, target, **after, **constants, DOT=tl.bfloat16, M=m, BLOCKS=4))
    for kernel in made:
        assert kernel.metadata.shared <= SHARED_BYTES[target.arch] * 1024
        if target.backend == "cuda":
            assert "mma" in kernel.asm["ptx"]  # by the card's matrix units
            assert "st.local" not in kernel.asm["ptx"]
