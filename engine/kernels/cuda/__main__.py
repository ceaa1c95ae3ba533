"""`python -m engine.kernels.cuda`: what the kernels take of each kind of card, and how long steps may take on some.

The first table is an estimate. The second compiles every kernel, which needs NVIDIA's compiler but no card; with
`--estimates` it is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from engine.formats import FORMATS
from engine.formats.ggml import BLOCK_TYPES
from engine.kernels.cuda.angles import ANGLES_KERNEL
from engine.kernels.cuda.attention import attention_kernels
from engine.kernels.cuda.compiled import Kernel, compile_kernel
from engine.kernels.cuda.exchange import exchange_kernels
from engine.kernels.cuda.groups import ROUND_KERNEL, group_kernels
from engine.kernels.cuda.latent import latent_kernels
from engine.kernels.cuda.norm import NORM_KERNEL
from engine.kernels.cuda.nvrtc import CompileError, find_nvrtc, usage_in
from engine.kernels.cuda.products import product_kernels, struct_of
from engine.kernels.cuda.rotary import ROTARY_KERNEL
from engine.kernels.cuda.router import router_kernels
from engine.kernels.cuda.step_time import CARDS, FUSED_OF_TOKEN, FUSED_OTHERS, QWEN3_30B_A3B, estimate
from engine.kernels.cuda.unpack import unpack_kernel

_ARCHITECTURES = (61, 70, 75, 80, 86, 89, 90, 120)
_KV_TOKENS = 4096


def all_kernels() -> list[Kernel]:
    """Every kernel that any card may be asked for."""
    on_cards = [each for each in FORMATS.values() if each.on_card]
    in_blocks = [each for each in BLOCK_TYPES.values() if each.is_blocks]
    packed = [*(each for each in on_cards if each.is_tiled), *in_blocks]
    unpacking = [unpack_kernel(each) for each in packed]
    products = [kernel for each in (*on_cards, *in_blocks) for kernel in product_kernels(struct_of(each))]
    groups = [ROUND_KERNEL, *(kernel for each in packed for kernel in group_kernels(struct_of(each)))]
    attention = [*attention_kernels(), *latent_kernels()]
    others = [NORM_KERNEL, ROTARY_KERNEL, ANGLES_KERNEL, *router_kernels()]
    return [*products, *groups, *unpacking, *attention, *others]


def nvidia_kernels() -> list[Kernel]:
    """The same, with those that only NVIDIA's cards run."""
    return [*all_kernels(), *exchange_kernels()]


def usage_rows() -> Iterator[list[str]]:
    """Registers of each kernel by architecture, as far as the compiler that is found knows them; + where they spill.

    Raises:
        CompileError: there is no compiler.
    """
    compiler = find_nvrtc()
    known = [each for each in _ARCHITECTURES if each in compiler.architectures()]
    yield ["kernel", "KiB shared", *(f"sm_{each}" for each in known)]
    for kernel in nvidia_kernels():
        found = [usage_in(compile_kernel(kernel, each, compiler).log) for each in known]
        registers = (f"{each.registers}{'+' if each.spilled_bytes else ''}" for each in found)
        yield [kernel.name, f"{max(each.shared_bytes for each in found) / 1024:.1f}", *registers]


def time_rows() -> Iterator[list[str]]:
    """Estimated tokens per second of Qwen3-30B-A3B with all experts on the card."""
    yield [
        "card",
        "format",
        "GB a token",
        "bandwidth alone",
        "launches",
        "tokens/s",
        "launches, fused",
        "tokens/s, fused",
    ]
    fused = replace(QWEN3_30B_A3B, others=FUSED_OTHERS, of_token=FUSED_OF_TOKEN)
    for card in CARDS:
        for name in ("int4", "int8"):
            now = estimate(card, QWEN3_30B_A3B, FORMATS[name], _KV_TOKENS)
            then = estimate(card, fused, FORMATS[name], _KV_TOKENS)
            speeds = [f"{1 / now.bound_s:.0f}", str(now.launches), f"{1 / now.seconds:.0f}"]
            yield [card.name, name, f"{now.nbytes / 1e9:.2f}", *speeds, str(then.launches), f"{1 / then.seconds:.0f}"]


def _print(rows: Iterator[list[str]]) -> None:
    for number, row in enumerate(rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        if number == 0:
            sys.stdout.write(f"|{'---|' * len(row)}\n")
    sys.stdout.write("\n")


def main(arguments: list[str]) -> int:
    """0, or 1 if there is no compiler."""
    sys.stdout.write(f"Estimated, with {_KV_TOKENS} tokens before:\n\n")
    _print(time_rows())
    if arguments == ["--estimates"]:
        return 0
    try:
        sys.stdout.write("Registers per thread, + where they do not suffice:\n\n")
        _print(usage_rows())
    except CompileError as error:
        sys.stderr.write(f"{error}.\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
