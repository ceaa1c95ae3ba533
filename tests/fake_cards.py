"""As much of `torch.cuda` and `torch.xpu` as a device needs; the CPU is the card, and work ends before it returns."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

GIB = 2**30


class Event:
    """Done once recorded."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self, _stream: "Stream") -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return self.at_s > 0.0

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, end: "Event") -> float:
        return (end.at_s - self.at_s) * 1e3


class Stream:
    """Never has anything in flight."""

    def __init__(self, cards: "FakeCards") -> None:
        self._cards = cards

    def synchronize(self) -> None:
        if self._cards.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def wait_stream(self, _other: "Stream") -> None: ...


@dataclass
class FakeCards:
    """In the place of `torch.cuda` or `torch.xpu`.

    Attributes:
        names: of the cards.
        free, total: bytes of each.
        fraction: the part of its memory that torch may allocate, as it was last set.
        emptied: how often torch's unused memory was given back.
        broken: what the driver says instead of opening a card.
        is_lost: whether they no longer respond.
    """

    names: list[str] = field(default_factory=lambda: ["Fake"])
    free: int = 4 * GIB
    total: int = 5 * GIB
    fraction: float = 0.0
    emptied: int = 0
    broken: str = ""
    is_lost: bool = False
    Event: type[Event] = Event

    def Stream(self, _device: torch.device, *, priority: int) -> Stream:
        assert priority <= 0
        return Stream(self)

    def is_available(self) -> bool:
        return bool(self.names)

    def device_count(self) -> int:
        return len(self.names)

    def get_device_name(self, index: int) -> str:
        return self.names[index]

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name=self.names[index], total_memory=self.total, driver_version="1.6")

    def get_arch_list(self) -> list[str]:
        return ["fake"]

    def mem_get_info(self, _place: torch.device) -> tuple[int, int]:
        if self.broken:
            raise RuntimeError(self.broken)
        return self.free, self.total

    def set_per_process_memory_fraction(self, fraction: float, _place: torch.device) -> None:
        self.fraction = fraction

    def empty_cache(self) -> None:
        self.emptied += 1

    def current_stream(self, _place: torch.device | None = None) -> Stream:
        return Stream(self)

    @contextlib.contextmanager
    def stream(self, _stream: Stream) -> Iterator[None]:
        yield


@dataclass
class FakeApple:
    """In the place of `torch.mps`.

    Attributes:
        most: bytes that the system recommends.
        held: bytes that are held already.
        fraction: of `most` that torch may allocate, as it was last set; synchronized: how often was waited.
    """

    most: int = 8 * GIB
    held: int = 0
    fraction: float = 0.0
    synchronized: int = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def recommended_max_memory(self) -> int:
        return self.most

    def driver_allocated_memory(self) -> int:
        return self.held

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        assert 0 < fraction <= 2  # 0 would be no limit
        self.fraction = fraction

    def synchronize(self) -> None:
        self.synchronized += 1
