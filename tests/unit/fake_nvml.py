"""NVIDIA's library as drivers make it: sound, broken, hanging, gone in the middle, back again."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30


class FakeNvml:
    """What of the module `pynvml` is used.

    Attributes:
        cards: answers by name of function, for each card; an answer may be an NVML error's number.
        failure: number of the error that every call from now on ends with; None while the driver works.
        hang: while set and not released, `nvmlDeviceGetCount` does not come back.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = list(cards)
        self.failure: int | None = None
        self.hang: threading.Event | None = None
        self.inits = 0
        self.shutdowns = 0

    def nvmlInit(self) -> None:
        self._fail()
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._fail()
        return "580.65"

    def nvmlDeviceGetCount(self) -> int:
        if self.hang is not None:
            self.hang.wait(30)
        self._fail()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        self._fail()
        handle = self.cards[index]
        if isinstance(handle.get("handle"), int):
            raise pynvml.NVMLError(handle["handle"])
        return handle

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def read(handle: dict[str, Any], *arguments: Any) -> Any:
            self._fail()
            answer = handle.get(name, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return read

    def _fail(self) -> None:
        if self.failure is not None:
            raise pynvml.NVMLError(self.failure)


def card(**changes: Any) -> dict[str, Any]:
    """An RTX 4090 with a gibibyte in use, in an x16 slot that rests at PCIe 1."""
    answers = {
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GIB, free=23 * GIB, used=GIB),
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetGraphicsRunningProcesses": [],
        "nvmlDeviceGetCudaComputeCapability": (8, 9),
        "nvmlDeviceGetEnforcedPowerLimit": 450_000,
        "nvmlDeviceGetPowerUsage": 123_000,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:01:00.0"),
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetCurrPcieLinkGeneration": 1,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMemoryBusWidth": 384,
        "nvmlDeviceGetMaxClockInfo": lambda kind: 10_501 if kind == pynvml.NVML_CLOCK_MEM else 2_520,
        "nvmlDeviceGetClockInfo": lambda kind: 10_501 if kind == pynvml.NVML_CLOCK_MEM else 2_000,
        "nvmlDeviceGetNumGpuCores": 16_384,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50, memory=25),
        "nvmlDeviceGetPcieThroughput": lambda kind: 1000 if kind == pynvml.NVML_PCIE_UTIL_RX_BYTES else 2000,
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
    }
    named = {f"nvmlDeviceGet{name}" if name != "handle" else name: answer for name, answer in changes.items()}
    return {**answers, **named}


def process(pid: int, nbytes: int | None) -> SimpleNamespace:
    """A program that uses video memory."""
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)
