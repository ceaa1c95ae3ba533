"""Decodes with the experts in a plain mapping of the converted file, paged by the system: the peer of the RAM tier.

A program of its own, `python -m benchmarks.mmap_peer`, because its memory is limited by a control group: the fair way
to page a file with limited RAM. It reads a JSON document on stdin and writes `{"tokens_per_s": ...}` to stdout.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.bench.opened import ForcedText, decode_seconds, opened
from engine.checkpoint.gguf.file import read_converted
from engine.common.config import EngineConfig
from engine.experts.dispatch import BANK_LAYER
from engine.kernels import choose_kernel
from engine.kernels.interface import LayerRecords
from engine.measure.link import forget_cached

if TYPE_CHECKING:
    from engine.runtime.loaded_model import LoadedModel

_ROOT = Path("/sys/fs/cgroup")
_SLACK = 32 * 2**20
"""Slack: the kernel counts in batches, and a process keeps allocating a little.  It favours the limited process."""


class MemoryGroup:
    """A control group folder; version 1 and 2 have the same files under other names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v1 = (folder / "memory.limit_in_bytes").exists()

    def join(self) -> None:
        """Moves this process into the group.

        Raises:
            OSError: not permitted.
        """
        (self.folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def limit_file_pages(self, nbytes: int) -> None:
        """Limits the group's file pages to `nbytes`, in addition to its current memory.

        Raises:
            OSError: not permitted.
        """
        statistics = (self.folder / "memory.stat").read_text(encoding="ascii").split()
        fields = {name: int(value) for name, value in zip(statistics[::2], statistics[1::2], strict=True)}
        usage, limit = ("usage_in_bytes", "limit_in_bytes") if self._is_v1 else ("current", "max")
        used = int((self.folder / f"memory.{usage}").read_text(encoding="ascii"))
        allocated = used - fields["inactive_file"] - fields["active_file"]
        (self.folder / f"memory.{limit}").write_text(str(allocated + nbytes + _SLACK), encoding="ascii")


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new group below our own, removed at the end, when its processes have ended.

    Raises:
        OSError: there are no control groups, or creating one is not permitted.
    """
    parent = _own_group()
    folder = Path(tempfile.mkdtemp(prefix="switchyard-bench-", dir=parent))
    try:
        if not any((folder / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            raise OSError("control groups here do not limit memory")
        yield MemoryGroup(folder)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _own_group() -> Path:
    if not sys.platform.startswith("linux"):
        raise OSError("only Linux has control groups")
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / group.strip("/")
        if not controllers and (_ROOT / "cgroup.controllers").exists():
            return _ROOT / group.strip("/")
    raise OSError("no control group of this process limits memory")


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
    _, _, tensors = read_converted(path)
    modules: dict[str, Any] = dict(loaded.model.named_modules())
    assert loaded.disk_backed is not None
    for spec in loaded.disk_backed.disk.table.layers:
        module = modules[spec.name]
        begin = tensors[spec.name].offset
        records = everything[begin : begin + spec.nbytes].view(spec.num_experts, spec.layout.nbytes)
        layer = LayerRecords(spec.name, spec.layout, records)
        setattr(module, BANK_LAYER, (layer, choose_kernel(module, layer, loaded.kernels)))
    loaded.disk_backed.close()


if __name__ == "__main__":
    main()
