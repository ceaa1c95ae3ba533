"""Latency of an expert on the CPU, on the device, and over the link: Fiddler's Algorithm 1, with measured times.

Fiddler (section 3.3) compares cpu_lat(s), linear in the tokens s, with a constant gpu_lat plus trans_lat, expert by
expert, which assumes that both sides are idle.  Here the CPU and the copy engine work concurrently, so `split_among`
assigns all misses of a layer together to minimise the time when the last one is done.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.experts.cache.policies import Key

_VERSION = 3
_EWMA_WEIGHT = 0.05
"""Weight of one observation in the exponential moving average."""
_PROMPT_WEIGHT = 0.2
"""The same for layers of prompts, which are few and long."""
_JOINING_DECAY = 0.998
"""Decay of the cost of joining both sides, each time that cost has kept a step off the device."""
_FETCHING_DECAY = 0.9995
_LAUNCHES_SHARE = 16
"""Launches for fetched experts may take one part in so many of the time of their copies."""
_FIRST_JOINS = 64
"""Steps whose joining is averaged, before the moving average."""
_MAX_RATIO = 2.0
"""Observations are clamped to this factor: a page fault or a scheduler pause is not a trend."""


@dataclass
class ObservedRatio:
    """Factor that corrects a measured time, a slow moving average of observed over predicted."""

    factor: float = 1.0
    weight: float = _EWMA_WEIGHT

    def observe(self, observed_s: float, predicted_s: float) -> None:
        """`predicted_s` is without the correction.  Invalid times are ignored."""
        if not (observed_s > 0 and predicted_s > 0 and math.isfinite(observed_s)):
            return
        off = observed_s / (predicted_s * self.factor)
        self.factor *= min(max(off, 1 / _MAX_RATIO), _MAX_RATIO) ** self.weight


@dataclass(frozen=True, slots=True)
class Estimate:
    """Cost of serving misses in one way, as a pipeline of two stages, each handling one expert at a time.

    Attributes:
        seconds: tokens of an expert -> its time in the second stage.
        bring_s: time of an expert in the first stage.
        backlog_s, busy_s: time until the first and the second stage are free.
        keeps_caller: the second stage runs on the calling thread, which all such ways share.
        caller_s: what each expert keeps the calling thread otherwise, before its own share.
        entry_s: what it takes once, for the first expert that is served so; asked of the first way only.
    """

    seconds: Callable[[int], float]
    bring_s: float = 0.0
    backlog_s: float = 0.0
    busy_s: float = 0.0
    keeps_caller: bool = False
    caller_s: float = 0.0
    entry_s: float = 0.0

    def alone_s(self, tokens: Sequence[int]) -> float:
        """When experts with so many tokens each are done, in this order, if all are served so."""
        arrived_s, ended_s = self.backlog_s, self.busy_s
        for count in tokens:
            arrived_s += self.bring_s
            ended_s = max(ended_s, arrived_s) + self.seconds(count)
        return ended_s


def split_among(misses: Sequence[tuple[Key, int]], ways: Sequence[Estimate]) -> list[list[Key]]:
    """Assigns misses to ways, to minimise the time when the last of them is done.

    Greedy, most tokens first: an expert moves from the first way to another if that makes the end earlier.  For the CPU
    and one link this is optimal while no expert has more tokens than the knee, since fetching any takes equally long.
    Beyond, where many tokens keep the device busier than the link, it is the usual rule for two machines (longest
    first, Graham 1969), and the order that overlaps copies and kernels best: equal times on the first of two machines,
    decreasing ones on the second (Johnson 1954).

    Args:
        misses: (key, tokens), any order.
        ways: the first one must keep the caller.

    Returns:
        Keys of each way, most tokens first; ties go to the first way.
    """
    order = sorted(misses, key=lambda miss: (-miss[1], miss[0]))
    sizes = {tokens for _, tokens in order}
    took_s = [{tokens: way.seconds(tokens) for tokens in sizes} for way in ways]
    served: list[list[Key]] = [[] for _ in ways]
    arrived_s, ended_s = [way.backlog_s for way in ways], [way.busy_s for way in ways]
    ended_s[0] += sum(took_s[0][tokens] for _, tokens in order)
    entry_s = ways[0].entry_s
    if all(not way.keeps_caller and way.backlog_s + way.bring_s >= ended_s[0] + entry_s for way in ways[1:]):
        served[0] = [key for key, _ in order]  # before another way had brought one, the first has done them all
        return served
    for key, tokens in order:
        chosen, now_s, best_s = 0, ended_s, (max(ended_s) * (1 - 1e-9), 0.0)
        for number in range(1, len(ways)):
            way, then_s = ways[number], ended_s.copy()
            then_s[0] += way.caller_s - took_s[0][tokens]
            place = 0 if way.keeps_caller else number
            then_s[place] = max(then_s[place], arrived_s[number] + way.bring_s) + took_s[number][tokens]
            end_s = max(then_s), sum(then_s)  # ties are broken by the least total time
            if end_s < best_s:
                chosen, now_s, best_s = number, then_s, end_s
        served[chosen].append(key)
        arrived_s[chosen] += ways[chosen].bring_s
        ended_s = now_s
    if entry_s and served[0]:
        for number, way in enumerate(ways[1:], 1):  # without the first way, nothing is paid for entering it
            if not way.keeps_caller and way.alone_s([tokens for _, tokens in order]) < max(ended_s) + entry_s:
                return [[key for key, _ in order] if each == number else [] for each in range(len(ways))]
    return served


@dataclass
class LatencyModel:
    """Seconds for one expert of one record size and precision on one machine and device.

    Attributes:
        precision, record_nbytes: of the measured experts.
        cpu_base_s, cpu_token_s, cpu_knee_tokens: the CPU takes base, plus token for each one beyond the knee.
        gpu_flat_s, gpu_knee_tokens, gpu_token_s: the device takes flat up to the knee, plus token for each one beyond.
        link_latency_s, link_bytes_per_s: of copying a record to the device.
        gpu_launch_s: the part of `gpu_flat_s` that experts share which are computed by one launch.
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
    _cpu: ObservedRatio = field(default_factory=ObservedRatio, init=False, compare=False)
    _gpu: ObservedRatio = field(default_factory=ObservedRatio, init=False, compare=False)
    _link: ObservedRatio = field(default_factory=ObservedRatio, init=False, compare=False)
    _cpu_prompt: ObservedRatio = field(
        default_factory=lambda: ObservedRatio(weight=_PROMPT_WEIGHT), init=False, compare=False
    )
    _fetching_s: float = field(default=0.0, init=False, compare=False)
    _fetches: int = field(default=0, init=False, compare=False)
    _joining_s: float = field(default=0.0, init=False, compare=False)
    _joins: int = field(default=0, init=False, compare=False)

    def __post_init__(self) -> None:
        numbers = [getattr(self, item.name) for item in fields(self) if item.type in ("float", "int")]
        if (
            not all(math.isfinite(number) and number >= 0 for number in numbers)
            or self.link_bytes_per_s == 0
            or self.gpu_launch_s > self.gpu_flat_s
        ):
            raise ValueError("invalid latency")

    def cpu_s(self, tokens: int) -> float:
        """One expert on the CPU."""
        return self._cpu_uncorrected_s(tokens) * self._cpu.factor

    def cpu_prompt_s(self, tokens: int) -> float:
        """The same among many experts of a prompt, which are computed by a few calls."""
        return self._cpu_uncorrected_s(tokens) * self._cpu_prompt.factor

    def price_of_fetching_s(self) -> float:
        """How long a token's step is kept from computing by each expert that it lets be fetched.

        It falls a little each time that it is asked for: one bad observation must not rule out fetching forever.
        """
        self._fetching_s *= _FETCHING_DECAY
        return self._fetching_s

    def gpu_s(self, tokens: int, together: int = 1) -> float:
        """One expert on the device, once it has been copied, by a launch that it shares with others."""
        shared_s = self.gpu_launch_s * (1 - 1 / together)
        return (self._gpu_uncorrected_s(tokens) - shared_s) * self._gpu.factor

    def together(self, fewest: int, most: int) -> int:
        """Experts to compute by one launch while others are copied: so many that launches take but a small part of
        the time of the copies; at least `fewest`, as far as `most` allows."""
        wanted = math.ceil(_LAUNCHES_SHARE * self.gpu_launch_s * self._gpu.factor / self.transfer_s)
        return min(max(fewest, wanted), most)

    def hits_s(self, hits: Sequence[int]) -> float:
        """Experts that are on the device, with so many tokens each, by one launch."""
        return _sum_s(partial(self.gpu_s, together=len(hits)), hits)

    @property
    def transfer_s(self) -> float:
        """One record over the link."""
        return self._transfer_uncorrected_s * self._link.factor

    def crossing_s(self, nbytes: int) -> float:
        """So many bytes over the link to the host, and the first of what comes back."""
        return 2 * self.link_latency_s + nbytes / self.link_bytes_per_s * self._link.factor

    def prefers_cpu(self, tokens: int) -> bool:
        """Algorithm 1 for a single miss."""
        return self.cpu_s(tokens) <= self.gpu_s(tokens) + self.transfer_s

    def prefers_cpu_alone(self, hits: Sequence[int], misses: Sequence[int]) -> bool:
        """Whether the CPU alone is faster than both sides together, even though the device has some of the experts.

        Args:
            hits, misses: tokens of each expert that is on the device, and of each that is not.
        """
        here_s = _sum_s(self.cpu_s, misses)
        there_s = self.hits_s(hits)
        alone_s = here_s + _sum_s(self.cpu_s, hits)
        if alone_s >= max(here_s, there_s) + self._joining_s:
            return False
        self._joining_s *= _JOINING_DECAY  # so that one bad observation does not rule out the device forever
        return True

    @property
    def is_new_to_joining(self) -> bool:
        """Whether the cost of joining both sides has been observed only a few times."""
        return self._joins < _FIRST_JOINS

    def split(
        self, misses: Sequence[tuple[Key, int]], backlog_s: float = 0.0, busy_s: float = 0.0
    ) -> tuple[list[Key], list[Key]]:
        """`split_among` the CPU and the link: keys (on the CPU, fetched)."""
        here = Estimate(self.cpu_s, keeps_caller=True)
        on_cpu, fetched = split_among(misses, [here, Estimate(self.gpu_s, self.transfer_s, backlog_s, busy_s)])
        return on_cpu, fetched

    def observe_both(self, hits: Sequence[int], misses: Sequence[int], took_s: float) -> None:
        """Both sides computed concurrently: the time beyond the slower side is the cost of joining them."""
        sides_s = max(self.hits_s(hits), _sum_s(self.cpu_s, misses))
        self._joins += 1
        weight = max(_EWMA_WEIGHT, 1 / self._joins)
        self._joining_s += weight * (min(max(took_s - sides_s, 0.0), _MAX_RATIO * sides_s) - self._joining_s)

    def observe_fetching(self, experts: int, took_s: float) -> None:
        """To let so many experts be fetched kept the step of a token so long."""
        self._fetches += 1
        self._fetching_s += max(_EWMA_WEIGHT, 1 / self._fetches) * (took_s / experts - self._fetching_s)

    def observe_cpu(self, tokens: Sequence[int], took_s: float, *, is_prompt: bool = False) -> None:
        """The CPU computed experts with these token counts, one after the other."""
        ratio = self._cpu_prompt if is_prompt else self._cpu
        ratio.observe(took_s, sum(map(self._cpu_uncorrected_s, tokens)))

    def observe_gpu(self, tokens: Sequence[int], took_s: float) -> None:
        """The device computed experts with these token counts by one launch."""
        alone_s = sum(map(self._gpu_uncorrected_s, tokens))
        self._gpu.observe(took_s, alone_s - self.gpu_launch_s * (len(tokens) - 1))

    def observe_transfer(self, took_s: float) -> None:
        """A record crossed the link."""
        self._link.observe(took_s, self._transfer_uncorrected_s)

    def _cpu_uncorrected_s(self, tokens: int) -> float:
        return self.cpu_base_s + self.cpu_token_s * max(0, tokens - self.cpu_knee_tokens)

    def _gpu_uncorrected_s(self, tokens: int) -> float:
        return self.gpu_flat_s + self.gpu_token_s * max(0, tokens - self.gpu_knee_tokens)

    @property
    def _transfer_uncorrected_s(self) -> float:
        return self.link_latency_s + self.record_nbytes / self.link_bytes_per_s


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
    entries = [
        {name: value for name, value in asdict(one).items() if not name.startswith("_")} for one in [*models, model]
    ]
    write_private(path, json.dumps({"version": _VERSION, "device": device, "models": entries}, indent=2))


def _read(path: Path) -> list[LatencyModel]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            return []
        return [LatencyModel(**entry) for entry in content["models"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
