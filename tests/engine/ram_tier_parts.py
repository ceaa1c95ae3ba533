"""Made-up records, a disk whose reads end when a test says so, and a RAM tier over them."""

from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.cache.policies import POLICY_NAMES
from engine.experts.cache.tier import ADAPTIVE
from engine.experts.direct_file import bytes_of
from engine.experts.disk_tier import Read
from engine.experts.ram_tier import RamTier
from engine.experts.record import RecordTable
from engine.experts.record_source import Held
from tests.engine.made_up_records import LARGE, SMALL, contents_of, random_records

CONTENTS = contents_of([(6, SMALL), (3, LARGE), (6, SMALL)])
RECORDS = random_records(CONTENTS)
BUDGET = 5 * SMALL.nbytes + 2 * LARGE.nbytes
POLICIES = (*(name for name in POLICY_NAMES if name != "static"), ADAPTIVE)


def make_tier(disk: Any, budget: int = BUDGET, policy: str = ADAPTIVE, at_least: int = 2) -> RamTier:
    return RamTier(disk, budget, policy=policy, at_least=at_least)


def arrived(held: Held) -> None:
    """Waits until what is held is there."""
    for arrival in held.arriving.values():
        arrival.result(60)


class HeldDisk:
    """Reads that end when the test says so: the one thing about a disk that cannot be had from a real one."""

    table = RecordTable(CONTENTS.tensors)
    note = ""

    def __init__(self) -> None:
        self.waiting: list[Read] = []
        self.hurried: list[Read] = []
        self.closed = False

    def read(self, layer: int, expert: int, into: torch.Tensor, *, urgent: bool) -> Read:
        if self.closed:
            raise EngineError(ErrorCode.INTERNAL, "closed")
        into.fill_(0xEE)  # what was in the slot is gone from the moment that the read begins
        read = Read(layer, expert, bytes_of(into))
        self.waiting.append(read)
        return read

    def hurry(self, read: Read) -> None:
        self.hurried.append(read)

    def close(self) -> None:
        for read in list(self.waiting):
            self.end(read)

    def end(self, read: Read, error: BaseException | None = None) -> None:
        self.waiting.remove(read)
        if error is not None:
            read.set_exception(error)
            return
        read.target[:] = bytes_of(RECORDS[read.layer][read.expert])
        read.set_result(None)
