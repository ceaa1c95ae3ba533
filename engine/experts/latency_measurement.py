"""Times the real kernels and the real link for `LatencyModel`, in a second or less."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import torch

from engine.common import clock
from engine.devices.device import CaptureError, Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.latency import LatencyModel
from engine.kernels.interface import ExpertKernel, LayerRecords

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""A prompt of 2,000 tokens routes about 125 to each of 128 experts, and several times as many to popular ones."""
_REPEATS = 5
_REPLAYS = 8
"""Replays of a captured launch that are timed together: one alone is as short as a card's clock is coarse."""
_MOST_EXPERTS = 8
"""Experts of one launch: as many as most models choose for a token."""


def measure(
    device: Device,
    bank: LayerRecords,
    cpu_kernel: ExpertKernel,
    make_kernel: Callable[[LayerRecords], ExpertKernel],
    hidden_width: int,
    *,
    dtype: torch.dtype,
    precision: str,
    budget_s: float = 0.9,
) -> LatencyModel:
    """Measures one layer's experts.

    Args:
        bank: in RAM, the source of the copies.
        cpu_kernel: bound to `bank`.
        make_kernel: binds a kernel to slots on the device.
        budget_s: measuring stops after this time; at least one token and one copy are always timed.

    Raises:
        DeviceMemoryError: one record does not fit on the device.
        EngineError: the device failed.
    """
    memory = _slots(device, bank.layout.nbytes)
    try:
        slots = LayerRecords("measured", bank.layout, memory)
        kernel = make_kernel(slots)
        if device.compute_follows_caller:
            _compile(device, kernel, hidden_width, dtype)
        begun_s = clock.now()
        cpu = _cpu_times(bank, cpu_kernel, hidden_width, dtype, begun_s + budget_s * 0.4)
        cpu_base_s, cpu_knee, cpu_token_s = fit_knee(cpu)
        latency_s, bytes_per_s = _link_times(device, bank, slots, begun_s + budget_s * 0.6)
        gpu = _gpu_times(device, kernel, hidden_width, dtype, begun_s + budget_s)
        together = _launch_times(device, kernel, len(memory), hidden_width, dtype)
    finally:
        device.memory.release(memory)
    flat_s, knee, each_s = fit_knee(gpu)
    launch_s = min(fit_line(together)[0], flat_s) if len(together) > 1 else 0.0
    return LatencyModel(
        precision,
        bank.layout.nbytes,
        cpu_base_s,
        cpu_token_s,
        flat_s,
        knee,
        each_s,
        latency_s,
        bytes_per_s,
        launch_s,
        cpu_knee,
    )


def _slots(device: Device, nbytes: int) -> torch.Tensor:
    """Memory for as many experts as one launch has, or for one if there is no more: [slots, nbytes].

    Raises:
        DeviceMemoryError: there is none for one.
    """
    with suppress(DeviceMemoryError):
        return device.memory.allocate(_MOST_EXPERTS * nbytes, MemoryCategory.STAGING).view(_MOST_EXPERTS, -1)
    return device.memory.allocate(nbytes, MemoryCategory.STAGING).view(1, -1)


def fit_line(times: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits (base, per token) to (tokens, seconds) by relative least squares; neither is negative."""
    if len(times) == 1:
        return times[0][1], 0.0
    weights = [1 / seconds**2 for _, seconds in times]
    total = sum(weights)
    x = sum(w * tokens for w, (tokens, _) in zip(weights, times, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, times, strict=True)) / total
    spread = sum(w * (tokens - x) ** 2 for w, (tokens, _) in zip(weights, times, strict=True))
    slope = sum(w * (tokens - x) * (seconds - y) for w, (tokens, seconds) in zip(weights, times, strict=True)) / spread
    if slope < 0:
        return y, 0.0
    return (y - slope * x, slope) if y >= slope * x else (0.0, y / x)


def fit_knee(times: Sequence[tuple[int, float]]) -> tuple[float, int, float]:
    """Best fit of (seconds up to the knee, the knee in tokens, seconds per token beyond), over all knees.

    Minimises relative errors, so that one token is fitted as well as the hundreds of a prompt.
    """
    fits = [_with_knee(times, count) for count in range(1, len(times) + 1)]
    return min(fits, key=lambda fit: fit[0])[1:]


def _with_knee(times: Sequence[tuple[int, float]], count: int) -> tuple[float, float, int, float]:
    """(squared error, *fit) with the first `count` times as the flat part."""
    knee = times[count - 1][0]
    flat_s = statistics.median(seconds for _, seconds in times[:count])
    beyond = [(tokens - knee, seconds) for tokens, seconds in times[count:]]
    rise = sum(more * (seconds - flat_s) / seconds**2 for more, seconds in beyond)
    each_s = max(0.0, rise / sum(more**2 / seconds**2 for more, seconds in beyond)) if beyond else 0.0
    error = sum(((flat_s + each_s * max(0, tokens - knee)) / seconds - 1) ** 2 for tokens, seconds in times)
    return error, flat_s, knee, each_s


def _cpu_times(
    bank: LayerRecords, kernel: ExpertKernel, width: int, dtype: torch.dtype, until_s: float
) -> list[tuple[int, float]]:
    times = []
    for tokens, hidden in _inputs(width, dtype, torch.device("cpu"), until_s):
        weights = torch.ones(tokens, 1)
        spans = []
        # A different expert each time, or the processor's cache would be measured; the first call is a warm-up.
        for repeat in range(_REPEATS + 1):
            index = torch.full((tokens, 1), (repeat + tokens) % bank.num_experts)
            begun_s = clock.now()
            with torch.inference_mode():
                kernel(hidden, index, weights)
            spans.append(clock.now() - begun_s)
        times.append((tokens, statistics.median(spans[1:])))
    return times


def _gpu_times(
    device: Device, kernel: ExpertKernel, width: int, dtype: torch.dtype, until_s: float
) -> list[tuple[int, float]]:
    place = device.torch_device
    times = []
    for tokens, hidden in _inputs(width, dtype, place, until_s):
        index = torch.zeros(tokens, 1, dtype=torch.int64, device=place)
        weights = torch.ones(tokens, 1, device=place)
        times.append((tokens, _took_s(device, partial(kernel, hidden, index, weights))))
    return times


def _launch_times(
    device: Device, kernel: ExpertKernel, slots: int, width: int, dtype: torch.dtype
) -> list[tuple[int, float]]:
    """(experts, seconds) of launches for one token and different experts."""
    place = device.torch_device
    hidden = torch.full((1, width), 0.01, dtype=dtype, device=place)
    times = []
    for experts in (count for count in (1, 2, 4, _MOST_EXPERTS) if count <= slots):
        index = torch.arange(experts, device=place)[None]
        weights = torch.full((1, experts), 1 / experts, device=place)
        times.append((experts, _took_s(device, partial(kernel, hidden, index, weights))))
    return times


def _took_s(device: Device, launch: Callable[[], object]) -> float:
    """Median seconds that a launch keeps the device.

    Where launches are queued, a captured one is replayed: on an idle card, the host would be measured instead.
    """

    def work() -> None:
        with torch.inference_mode():
            launch()

    with ExitStack() as held:
        repeated, repeats = work, 1
        if device.compute_follows_caller and device.new_capture is not None:
            work()  # what compiles or allocates cannot be captured
            capture = device.new_capture()
            held.callback(capture.close)
            try:
                capture.begin()
                work()
                repeated, repeats = capture.end().replay, _REPLAYS
            except (RuntimeError, CaptureError):  # kernels for many tokens may read a number back
                capture.abandon()
        spans = []
        for _ in range(_REPEATS + 1):
            event = device.compute_stream.submit(lambda: [repeated() for _ in range(repeats)])
            event.wait()
            spans.append((event.ended_s - event.started_s) / repeats)
        return statistics.median(spans[1:])


def _compile(device: Device, kernel: ExpertKernel, width: int, dtype: torch.dtype) -> None:
    """Triggers compilation of the device's kernels for one and for many tokens; it takes seconds on the first run."""
    place = device.torch_device
    for tokens in (1, _TOKENS[-1]):
        hidden = torch.zeros(tokens, width, dtype=dtype, device=place)
        index = torch.zeros(tokens, 1, dtype=torch.int64, device=place)
        with torch.inference_mode():
            device.compute_stream.submit(partial(kernel, hidden, index, torch.ones(tokens, 1, device=place))).wait()


def _link_times(device: Device, bank: LayerRecords, slots: LayerRecords, until_s: float) -> tuple[float, float]:
    """(latency, bytes per second)."""
    stream, record = device.h2d_stream, slots.records[0]
    small = min(4096, record.nbytes // 2)

    def took_s(source: torch.Tensor) -> float:
        event = stream.copy(record[: source.nbytes], source, None)
        event.wait()
        return event.ended_s - event.started_s

    # Small copies come first, to absorb one-time initialisation by the first copy of a process.
    latencies = [took_s(bank.records[0][:small]) for _ in range(_REPEATS)]
    whole = [took_s(bank.records[0])]
    for expert in range(1, _REPEATS):
        if clock.now() > until_s:
            break
        whole.append(took_s(bank.records[expert % bank.num_experts]))
    latency_s, record_s = statistics.median(latencies[1:]), statistics.median(whole)
    # If latency dominates, bandwidth cannot be resolved: attribute at most half of the time to latency.
    latency_s = min(latency_s, record_s / 2)
    return latency_s, record.nbytes / max(record_s - latency_s, 1e-9)


def _inputs(width: int, dtype: torch.dtype, place: torch.device, until_s: float) -> Iterator[tuple[int, torch.Tensor]]:
    for tokens in _TOKENS:
        if tokens > 1 and clock.now() > until_s:
            return
        yield tokens, torch.full((tokens, width), 0.01, dtype=dtype, device=place)
