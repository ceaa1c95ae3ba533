"""All experts of a bank file into a bank in RAM, at the disk's rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.experts.bank import ExpertBank
from engine.experts.disk_tier import DiskTier, Read

_LAYERS_AHEAD = 2


def load_prepared(disk: DiskTier, bank: ExpertBank, on_progress: Callable[[int, int], None]) -> None:
    """Allocates and fills every layer of an empty bank on the CPU.

    Args:
        on_progress: told (bytes of records read, in all) by the calling thread; what it raises ends the loading.

    Raises:
        EngineError: as `DiskTier.read`.
    """
    total, done = disk.header.records_nbytes, 0
    under_way: deque[Read] = deque()
    try:
        for index, spec in enumerate(disk.header.layers):
            records = bank.add_layer(spec.name, spec.num_experts, spec.layout).records
            reads = disk.read_all(index, records)
            under_way.extend(reads)
            # The next layer is asked for before this one has come, or the disk would idle in between.
            while len(under_way) > _LAYERS_AHEAD * len(reads):
                done += _finish(disk, under_way[0])
                under_way.popleft()
                on_progress(done, total)
        while under_way:
            done += _finish(disk, under_way[0])
            under_way.popleft()
            on_progress(done, total)
    except BaseException:
        for read in under_way:  # they write into memory that is about to be freed
            read.exception()
        raise


def _finish(disk: DiskTier, read: Read) -> int:
    read.result()
    return read.count * disk.header.layers[read.layer].layout.nbytes
