"""Latency of an expert on the CPU, on the device, and over the link: Fiddler's Algorithm 1, with measured times.

Fiddler (section 3.3) compares cpu_lat(s), linear in the tokens s, with a constant gpu_lat plus trans_lat, expert by
expert, which assumes that both sides are idle.  Here the CPU and the copy engine work concurrently, so
`engine.experts.shares` assigns all misses of a layer together to minimise the time when the last one is done.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch

from engine.common import clock
from engine.common.choice import Choice
from engine.common.costs import Cost, CostModel, prefers_cpu
from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.devices.device import CaptureError, Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.kernels.interface import ExpertKernel, LayerRecords

_VERSION = 3
_PROMPT_WEIGHT = 0.2
"""Of one observation of prompts' layers, which are few and long."""
_FADES = 0.9995
"""Factor on what keeps the calling thread, each time that it is asked for: what is avoided is not observed."""
_LAUNCHES_SHARE = 16
"""Launches for fetched experts may take one part in so many of the time of their copies."""


@dataclass
class LatencyModel:
    """Seconds for one expert of one record size and precision on one machine and device.

    Attributes:
        precision, record_nbytes: of the measured experts.
        cpu_base_s, cpu_token_s, cpu_knee_tokens: the CPU takes base, plus token for each one beyond the knee.
        gpu_flat_s, gpu_knee_tokens, gpu_token_s: the device takes flat up to the knee, plus token for each one beyond.
        link_latency_s, link_bytes_per_s: of copying a record to the device.
        gpu_launch_s: the part of `gpu_flat_s` that experts share which are computed by one launch.
        costs: the same as the run corrects it, and what else it finds of steps.
    """

    precision: str
    record_nbytes: int
    cpu_base_s: float
    cpu_token_s: float
    gpu_flat_s: float
    gpu_knee_tokens: int
    gpu_token_s: float
    link_latency_s: float
    link_bytes_per_s: float
    gpu_launch_s: float = 0.0
    cpu_knee_tokens: int = 0
    costs: CostModel = field(default_factory=CostModel, init=False, compare=False, repr=False)
    _of_size: dict[int, Choice[bool]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Of steps with about so many experts: whether the CPU computes all of them."""

    def __post_init__(self) -> None:
        numbers = [getattr(self, item.name) for item in fields(self) if item.type in ("float", "int")]
        if (
            not all(math.isfinite(number) and number >= 0 for number in numbers)
            or self.link_bytes_per_s == 0
            or self.gpu_launch_s > self.gpu_flat_s
        ):
            raise ValueError("invalid latency")
        costs = self.costs
        self._cpu = costs.know(Cost.CPU_EXPERT, self._on_cpu_s)
        self._cpu_prompt = costs.know(Cost.CPU_PROMPT_EXPERT, self._on_cpu_s, weight=_PROMPT_WEIGHT)
        self._card = costs.know(Cost.CARD_EXPERT, self._on_card_s)
        self._link = costs.know(Cost.H2D, lambda nbytes: self.link_latency_s + nbytes / self.link_bytes_per_s)
        costs.learn(Cost.FETCHING, fades=_FADES)
        for kind in (Cost.FETCHING_FOR_PROMPT, Cost.ENTERING, Cost.BETWEEN):
            costs.learn(kind, weight=_PROMPT_WEIGHT, fades=_FADES)

    def _on_cpu_s(self, tokens: float) -> float:
        return self.cpu_base_s + self.cpu_token_s * max(0, tokens - self.cpu_knee_tokens)

    def _on_card_s(self, tokens: float) -> float:
        return self.gpu_flat_s + self.gpu_token_s * max(0, tokens - self.gpu_knee_tokens)

    def cpu_s(self, tokens: int) -> float:
        """One expert on the CPU."""
        return self._cpu.seconds(tokens)

    def cpu_prompt_s(self, tokens: int) -> float:
        """The same among many experts of a prompt, which are computed by a few calls."""
        return self._cpu_prompt.seconds(tokens)

    def price_of_entering_s(self, nbytes: int) -> float:
        """What a prompt's way to the CPU and back takes once, besides computing, if so many bytes have to come."""
        return self.crossing_s(nbytes) + self.costs.predict(Cost.ENTERING)

    def fit_between_layers(self, arriving: int) -> int:
        """Records that the link can bring, behind those on their way, before a prompt's next layer is planned."""
        return max(0, int(self.costs.predict(Cost.BETWEEN) / self.transfer_s) - arriving)

    def gpu_s(self, tokens: int, together: int = 1) -> float:
        """One expert on the device, once it has been copied, by a launch that it shares with others."""
        shared_s = self.gpu_launch_s * (1 - 1 / together)
        return self._card.seconds(tokens) - shared_s * self._card.factor

    def together(self, fewest: int, most: int) -> int:
        """Experts to compute by one launch while others are copied: so many that launches take but a small part of
        the time of the copies; at least `fewest`, as far as `most` allows."""
        launch_s = self.gpu_launch_s * self._card.factor
        return min(max(fewest, math.ceil(_LAUNCHES_SHARE * launch_s / self.transfer_s)), most)

    def hits_s(self, hits: Sequence[int]) -> float:
        """Experts that are on the device, with so many tokens each, by one launch."""
        return _sum_s(partial(self.gpu_s, together=len(hits)), hits)

    @property
    def transfer_s(self) -> float:
        """One record over the link."""
        return self._link.seconds(self.record_nbytes)

    def crossing_s(self, nbytes: int) -> float:
        """So many bytes over the link to the host, if any, and the first of what comes back."""
        return (2 if nbytes else 1) * self.link_latency_s + self.carrying_s(nbytes)

    def carrying_s(self, nbytes: int) -> float:
        """So many bytes over the link, behind others."""
        return nbytes / self.link_bytes_per_s * self._link.factor

    def prefers_cpu(self, tokens: int) -> bool:
        """Algorithm 1 for a single miss."""
        return prefers_cpu(self.costs, self.record_nbytes, tokens)

    def sides(self, hits: Sequence[int], misses: Sequence[int]) -> dict[bool, float]:
        """Seconds of a step's layer if the CPU alone computes it, and if both sides do, each its part.

        Args:
            hits, misses: tokens of each expert that is on the device, and of each that is not.
        """
        here_s = _sum_s(self.cpu_s, misses)
        return {True: here_s + _sum_s(self.cpu_s, hits), False: max(here_s, self.hits_s(hits))}

    def side(self, experts: int, is_busy: Callable[[], bool] = lambda: False) -> Choice[bool]:
        """Whether the CPU alone computes a step's layer with about so many experts.

        What waking and joining both sides takes beyond computing grows with them.
        """
        size = experts.bit_length()
        if size not in self._of_size:
            self._of_size[size] = Choice((False, True), is_busy=is_busy)
        return self._of_size[size]

    def observe_gpu(self, tokens: Sequence[int], took_s: float) -> None:
        """The device computed experts with these token counts by one launch."""
        self.costs.correct(Cost.CARD_EXPERT, took_s, self.hits_s(tokens) / self._card.factor)


def _sum_s(seconds: Callable[[int], float], experts: Sequence[int]) -> float:
    """Of experts with so many tokens each; most steps have one token, and this is asked for in every layer."""
    first = experts[0] if experts else 0
    if experts.count(first) == len(experts):
        return len(experts) * seconds(first) if experts else 0.0
    return sum(map(seconds, experts))


def latency_file(device: str) -> Path:
    """File with the measurements of this machine and device."""
    machine = f"{platform.node()} {platform.machine()} {os.cpu_count()}"
    mark = hashlib.sha256(machine.encode()).hexdigest()[:12]
    return cache_dir() / "latency" / f"{re.sub('[^A-Za-z0-9_.-]', '-', device)}-{mark}.json"


def load_latency(device: str, precision: str, record_nbytes: int) -> LatencyModel | None:
    """The saved measurement; None if there is none or the file is unreadable, so that it is measured again."""
    for model in _read(latency_file(device)):
        if (model.precision, model.record_nbytes) == (precision, record_nbytes):
            return model
    return None


def save_latency(device: str, model: LatencyModel) -> None:
    """Saves a measurement, replacing an earlier one of the same precision and record size.

    Raises:
        OSError: the write failed; the previous file is unchanged.
    """
    path = latency_file(device)
    mine = (model.precision, model.record_nbytes)
    models = [other for other in _read(path) if (other.precision, other.record_nbytes) != mine]
    names = [item.name for item in fields(model) if item.init]
    entries = [{name: getattr(one, name) for name in names} for one in [*models, model]]
    write_private(path, json.dumps({"version": _VERSION, "device": device, "models": entries}, indent=2))


def _read(path: Path) -> list[LatencyModel]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            return []
        return [LatencyModel(**entry) for entry in content["models"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


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
