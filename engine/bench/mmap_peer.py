"""Decodes with the experts in a plain mapping of the bank file, paged by the system: the peer of the RAM tier.

A program of its own, `python -m engine.bench.mmap_peer`, because its memory is limited by a control group.  It reads a
JSON document on stdin and writes `{"tokens_per_s": ...}` to stdout.
"""

from __future__ import annotations

import json
import mmap
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.bench.forced_text import ForcedText, decode_seconds
from engine.bench.memory_group import MemoryGroup
from engine.bench.opened import opened
from engine.common.config import EngineConfig
from engine.experts.bank import BankLayer
from engine.experts.bank_file import BankFile
from engine.experts.dispatch import BANK_LAYER
from engine.kernels import choose_kernel
from engine.measure.disk import forget_cached

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

PASS_S = 30.0
"""Tokens per pass; the first of two passes fills the page cache."""


def request(config: EngineConfig, text: ForcedText, bank: Path, group: Path, expert_ram: int) -> str:
    """The JSON document that `main` reads.

    Args:
        group: folder of the control group to join.
        expert_ram: bytes of the bank's pages that may be in RAM.
    """
    return json.dumps(
        {
            "config": asdict(config),
            "prompt": text.prompt,
            "answer": text.answer,
            "bank": str(bank),
            "group": str(group),
            "expert_ram": expert_ram,
        }
    )


def main() -> None:
    """Loads the model, maps its experts, limits the memory, decodes."""
    asked = json.load(sys.stdin)
    group = MemoryGroup(Path(asked["group"]))
    group.join()
    config, bank = EngineConfig(**asked["config"]), Path(asked["bank"])
    text = ForcedText(tuple(asked["prompt"]), tuple(asked["answer"]))
    with opened(config) as loaded, torch.inference_mode():
        _map_experts(loaded, bank)
        forget_cached([bank, *Path(config.model).glob("*.safetensors")])
        group.limit_file_pages(asked["expert_ram"])
        decode_seconds(loaded, text, PASS_S)
        seconds = decode_seconds(loaded, text, PASS_S)
    json.dump({"tokens_per_s": len(seconds) / sum(seconds)}, sys.stdout)


def _map_experts(loaded: LoadedModel, path: Path) -> None:
    """Binds every experts module that is read from disk to its records in the mapped file, and frees their slots."""
    with path.open("rb") as stream:
        # Private and writable because torch has no read-only tensors; never written.
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    everything = torch.frombuffer(mapped, dtype=torch.uint8)
    with BankFile(path) as file:
        header = file.header
    modules: dict[str, Any] = dict(loaded.model.named_modules())
    for index, spec in enumerate(header.layers):
        module = modules[spec.name]
        begin = header.record_offset(index, 0)
        records = everything[begin : begin + spec.nbytes].view(spec.num_experts, spec.layout.nbytes)
        layer = BankLayer(spec.name, spec.layout, records)
        setattr(module, BANK_LAYER, (layer, choose_kernel(module, layer, loaded.kernels)))
    if loaded.disk_backed is not None:
        loaded.disk_backed.close()


if __name__ == "__main__":
    main()
