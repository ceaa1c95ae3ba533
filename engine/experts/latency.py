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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path

from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.experts.cache.policies import Key
from engine.experts.shares import Estimate, split_among

_VERSION = 3
_EWMA_WEIGHT = 0.05
"""Weight of one observation in the exponential moving average."""
_PROMPT_WEIGHT = 0.2
"""The same for layers of prompts, which are few and long."""
_JOINING_DECAY = 0.998
"""Decay of the cost of joining both sides, each time that cost has kept a step off the device."""
_PRICE_DECAY = 0.9995
_FIRST_PRICES = 8
"""Observations of a price that are taken as they are."""
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


@dataclass
class HostPrice:
    """What something keeps the calling thread, a moving average.

    It falls a little each time that it is asked for: one bad observation must not rule anything out forever.

    Attributes:
        weight: of one observation, once there are some.
    """

    weight: float = _EWMA_WEIGHT
    _seconds: float = 0.0
    _observed: int = 0

    @property
    def is_new(self) -> bool:
        """Whether it has been observed only a few times."""
        return self._observed < _FIRST_PRICES

    def asked(self) -> float:
        """Seconds; 0 before anything was observed."""
        self._seconds *= _PRICE_DECAY
        return self._seconds

    def observe(self, took_s: float) -> None:
        """It has kept the thread so long."""
        self._observed += 1
        if self._observed > _FIRST_PRICES:
            took_s = min(took_s, _MAX_RATIO * self._seconds)
        self._seconds += max(self.weight, 1 / self._observed) * (took_s - self._seconds)


@dataclass
class _Sides:
    """Of steps with about so many experts: what they take beyond computing, which grows with the experts.

    Attributes:
        joining_s: where both sides compute; joins: how often that was observed.
        alone: where the CPU computes everything.
    """

    joining_s: float = 0.0
    joins: int = 0
    alone: HostPrice = field(default_factory=HostPrice)


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
    _fetching: HostPrice = field(default_factory=HostPrice, init=False, compare=False)
    _fetching_prompt: HostPrice = field(default_factory=lambda: HostPrice(_PROMPT_WEIGHT), init=False, compare=False)
    _entering: HostPrice = field(default_factory=lambda: HostPrice(_PROMPT_WEIGHT), init=False, compare=False)
    _between: HostPrice = field(default_factory=lambda: HostPrice(_PROMPT_WEIGHT), init=False, compare=False)
    _of_size: dict[int, _Sides] = field(default_factory=dict, init=False, compare=False)

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

    def price_of_fetching_s(self, *, is_prompt: bool = False) -> float:
        """How long a step is kept from computing by each expert that it lets be fetched."""
        return (self._fetching_prompt if is_prompt else self._fetching).asked()

    def price_of_entering_s(self, nbytes: int) -> float:
        """What a prompt's way to the CPU and back takes once, besides computing, if so many bytes have to come."""
        return self.crossing_s(nbytes) + self._entering.asked()

    def fit_between_layers(self, arriving: int) -> int:
        """Records that the link can bring, behind those on their way, before a prompt's next layer is planned."""
        return max(0, int(self._between.asked() / self.transfer_s) - arriving)

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
        """So many bytes over the link to the host, if any, and the first of what comes back."""
        return (2 if nbytes else 1) * self.link_latency_s + self.carrying_s(nbytes)

    def carrying_s(self, nbytes: int) -> float:
        """So many bytes over the link, behind others."""
        return nbytes / self.link_bytes_per_s * self._link.factor

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
        sides = self._sides(len(hits) + len(misses))
        alone_s = here_s + _sum_s(self.cpu_s, hits) + sides.alone.asked()
        if alone_s >= max(here_s, there_s) + sides.joining_s:
            return False
        sides.joining_s *= _JOINING_DECAY  # so that one bad observation does not rule out the device forever
        return True

    def is_new_to_joining(self, experts: int) -> bool:
        """Whether the cost of joining both sides has been observed only a few times, for about so many experts."""
        return self._sides(experts).joins < _FIRST_JOINS

    def is_new_to_being_alone(self, experts: int) -> bool:
        """The same of what the CPU alone takes beside computing."""
        return self._sides(experts).alone.is_new

    def _sides(self, experts: int) -> _Sides:
        return self._of_size.setdefault(experts.bit_length(), _Sides())

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
        sides = self._sides(len(hits) + len(misses))
        sides.joins += 1
        weight = max(_EWMA_WEIGHT, 1 / sides.joins)
        sides.joining_s += weight * (min(max(took_s - sides_s, 0.0), _MAX_RATIO * sides_s) - sides.joining_s)

    def observe_alone(self, experts: Sequence[int], took_s: float) -> None:
        """The CPU computed all experts of a step, with these token counts, which took so long altogether."""
        self._sides(len(experts)).alone.observe(max(0.0, took_s - _sum_s(self.cpu_s, experts)))

    def observe_fetching(self, experts: int, took_s: float, *, is_prompt: bool = False) -> None:
        """To let so many experts be fetched kept a step so long."""
        (self._fetching_prompt if is_prompt else self._fetching).observe(took_s / experts)

    def observe_entering(self, nbytes: int, took_s: float) -> None:
        """A prompt's way to the CPU and back took so long, besides computing, with so many bytes that had to come."""
        self._entering.observe(max(0.0, took_s - self.crossing_s(nbytes)))

    def observe_between(self, took_s: float) -> None:
        """A prompt's layer was planned so long after experts had been brought ahead for it."""
        self._between.observe(took_s)

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
