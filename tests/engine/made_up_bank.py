"""Bank files of random bytes, without a model: what the tiers are tested on."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.experts.bank_header import BankHeader, BankLayerSpec
from engine.experts.bank_writer import BankWriter
from engine.experts.checksums import BEST_CHECKSUM
from engine.experts.record import RecordLayout, allocate_records

CPU = torch.device("cpu")


def layout(width: int) -> RecordLayout:
    """A record of `width` * 96 bf16 weights and a bias."""
    shapes = {"gate_up_proj": ((64, width), torch.bfloat16), "down_proj": ((width, 32), torch.bfloat16)}
    return RecordLayout.of({**shapes, "down_proj_bias": ((width,), torch.bfloat16)}, transposed=False)


SMALL, LARGE = layout(8), layout(100)


def header_of(layers: list[tuple[int, RecordLayout]], checksum: str = BEST_CHECKSUM) -> BankHeader:
    """A bank with so many experts of this layout in each layer."""
    specs = tuple(BankLayerSpec(f"layers.{index}.experts", *layer) for index, layer in enumerate(layers))
    return BankHeader("bf16", None, checksum, {"files": [["made.up", 1, 2]], "headers": "00"}, specs)


def random_records(header: BankHeader, seed: int = 5) -> list[torch.Tensor]:
    """The records of every layer, [E, nbytes], zero between the parts."""
    generator, made = torch.Generator().manual_seed(seed), []
    for layer in header.layers:
        records = allocate_records(layer.num_experts, layer.layout, CPU)
        records.zero_()
        for part in layer.layout.parts:
            shape = (layer.num_experts, part.nbytes)
            bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            records[:, part.offset : part.offset + part.nbytes] = bits
        made.append(records)
    return made


def write_bank(path: Path, header: BankHeader, *, direct: bool = True) -> list[torch.Tensor]:
    """Writes the bank and returns its records."""
    records = random_records(header)
    with BankWriter(path, header, direct=direct) as writer:
        for layer, made in enumerate(records):
            writer.write_layer(layer, made, lambda count: None)
        writer.finish()
    return records


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Changes one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        (value,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([value ^ (1 << bit)]))
