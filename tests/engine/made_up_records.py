"""Files of random records, without a model: what the tiers are tested on."""

from pathlib import Path
from typing import Any

import torch

from engine.experts.container import ContainerWriter, Contents, open_container
from engine.experts.disk_tier import DiskTier
from engine.experts.record import LayerSpec, allocate_records
from engine.formats.tiles import RecordLayout

CPU = torch.device("cpu")


def layout(width: int) -> RecordLayout:
    """A record of `width` * 96 bf16 weights and a bias."""
    shapes = {"gate_up_proj": ((64, width), torch.bfloat16), "down_proj": ((width, 32), torch.bfloat16)}
    return RecordLayout.of({**shapes, "down_proj_bias": ((width,), torch.bfloat16)}, transposed=False)


SMALL, LARGE = layout(8), layout(100)


def contents_of(layers: list[tuple[int, RecordLayout]]) -> Contents:
    """So many experts of this layout in each layer."""
    specs = tuple(LayerSpec(f"layers.{index}.experts", *layer) for index, layer in enumerate(layers))
    return Contents("made up", "bf16", {"files": [["made.up", 1, 2]], "content": "00"}, specs)


def random_records(contents: Contents, seed: int = 5) -> list[torch.Tensor]:
    """The records of every layer, [E, nbytes], zero between the parts."""
    generator, made = torch.Generator().manual_seed(seed), []
    for layer in contents.tensors:
        records = allocate_records(layer.num_experts, layer.layout, CPU)
        records.zero_()
        for part in layer.layout.parts:
            shape = (layer.num_experts, part.nbytes)
            bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            records[:, part.offset : part.offset + part.nbytes] = bits
        made.append(records)
    return made


def write_records(path: Path, contents: Contents, *, direct: bool = True) -> list[torch.Tensor]:
    """Writes the file and returns its records."""
    records = random_records(contents)
    with ContainerWriter(path, contents, direct=direct) as writer:
        for layer, made in enumerate(records):
            writer.write(layer, made, lambda count: None)
        writer.finish()
    return records


def disk_of(path: Path, contents: Contents, **options: Any) -> DiskTier:
    """A disk tier over the file."""
    container = open_container(path, contents)
    return DiskTier(contents.tensors, [container.parts(spec.name) for spec in contents.tensors], container, **options)


def place_of(contents: Contents, layer: int, expert: int) -> int:
    """Where a record begins."""
    return contents.offsets[layer] + expert * contents.tensors[layer].layout.nbytes


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Changes one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        (value,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([value ^ (1 << bit)]))
