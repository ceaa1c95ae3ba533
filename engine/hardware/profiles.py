"""Profiles of graphics cards for emulated devices, in `resources/emulated_machines.json`.

Some have a clock of their own, and a processor beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import resources_dir
from engine.hardware.machine import CallProfile, CpuProfile, GpuProfile, HardwareProfile, LinkProfile, Origin

EMULATED = "emulated:"
"""What the names of emulated devices begin with."""
_SEVERAL = re.compile(r"(.+)x(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A card and its link to the host.

    Attributes:
        description: display text.
        vram_bytes: memory.
        link_h2d_gbps, link_d2h_gbps: bandwidth to the card and back, in 1e9 bytes per second.
        link_latency_us: fixed cost of each copy in microseconds.
        compute_slowdown: factor of kernel times over this machine's CPU; 1 is no slower.
        card_gbps, card_tflops: of its memory in 1e9 bytes per second, and of its 16-bit matrix arithmetic, by its data
            sheet; 0 for a card that computes on this machine's CPU, and so has no clock of its own.
        launch_us: from one of its kernels to the next.
        peer_gbps: from one such card to another; 0 where copies go through the host.
        call_us: of the host's time for each call of its driver.
        cpu_slowdown: factor of kernel times on the host's CPU over this machine's.
        cpu_gbps, cpu_tflops: of the host's CPU, where its time is modelled as well.
    """

    name: str
    description: str
    vram_bytes: int
    link_h2d_gbps: float
    link_d2h_gbps: float
    link_latency_us: float
    compute_slowdown: float = 1.0
    card_gbps: float = 0.0
    card_tflops: float = 0.0
    launch_us: float = 4.0
    peer_gbps: float = 0.0
    call_us: float = 3.0
    cpu_slowdown: float = 1.0
    cpu_gbps: float = 20.0
    cpu_tflops: float = 0.5

    @property
    def has_clock(self) -> bool:
        """Whether its time is modelled."""
        return self.card_gbps > 0 and self.card_tflops > 0

    @property
    def from_peers(self) -> tuple[float, float]:
        """(bytes per second, seconds) of copies from another such card: through the host if they have no link."""
        latency_s = self.link_latency_us / 1e6
        if self.peer_gbps:
            return self.peer_gbps * 1e9, latency_s
        return 1e9 / (1 / self.link_d2h_gbps + 1 / self.link_h2d_gbps), 2 * latency_s


_FIXED_HOST, _ONLY_HOST = "?host=fixed", "?host=only"
_ROOMY = 2**37
_CALLS_OF_LAYER, _CALLS_OF_CARD, _CALLS_OF_HOST, _CALLS_OF_FETCH, _CALLS_OF_SUM = 4, 4, 4, 3, 6
"""Calls of the driver, of `call_us` each, that the dispatcher makes for a layer, a card's share, the CPU's, an expert
that is fetched, and what another card than the first has summed up."""


_lent: dict[str, DeviceProfile] = {}


@contextmanager
def lent(*profiles: DeviceProfile) -> Iterator[None]:
    """Within, these are found by their names, too: machines that no file has."""
    _lent.update({profile.name: profile for profile in profiles})
    try:
        yield
    finally:
        for profile in profiles:
            _lent.pop(profile.name, None)


@cache
def _shipped() -> Mapping[str, DeviceProfile]:
    """Those that come with the program, by their names."""
    listed = json.loads((resources_dir() / "emulated_machines.json").read_text(encoding="utf-8"))
    return {each["name"]: DeviceProfile(**each) for each in listed}


def profile_names() -> list[str]:
    """Of cards that compute as fast as this machine allows, behind a link of their own."""
    return [name for name, profile in _shipped().items() if not profile.has_clock]


def timed_profiles() -> list[DeviceProfile]:
    """The machines whose cards have a clock of their own."""
    return [profile for profile in _shipped().values() if profile.has_clock]


def read_profile(name: str) -> DeviceProfile:
    """The profile of this name.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none.
    """
    found = _lent.get(name) or _shipped().get(name)
    if found is None:
        known = ", ".join(profile_names())
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"There is no hardware profile called {name!r}: use one of {known}."
        )
    return found


def has_fixed_host(device: str) -> bool:
    """Whether the host's time is modelled as well: `emulated:NAME?host=fixed`."""
    return device.endswith((_FIXED_HOST, _ONLY_HOST))


def of_machine(device: str) -> DeviceProfile:
    """The card of `emulated:NAME`; with `?host=only`, the processor beside it, as if it were a card with all of RAM."""
    profile = read_profile(emulated_cards(device)[0])
    if not (profile.has_clock and device.endswith(_ONLY_HOST)):
        return profile
    return replace(
        profile,
        vram_bytes=_ROOMY,
        card_gbps=profile.cpu_gbps,
        card_tflops=profile.cpu_tflops,
        launch_us=profile.call_us,
    )


def emulated_cards(device: str) -> tuple[str, int]:
    """(name of the profile, number of cards) of `emulated:NAME`, `emulated:NAMExN`, or one card, `emulated:NAME#0`.

    `pcie3-x8` is a profile if there is one called so; otherwise it would be eight cards of `pcie3-`.  The profile need
    not exist.
    """
    which = device.removeprefix(EMULATED).partition("#")[0].partition("?")[0]
    several = _SEVERAL.fullmatch(which)
    if several is None:
        return which, 1
    if which in _shipped() or several[1] not in _shipped():
        return which, 1
    return several[1], int(several[2][:9])


def with_emulated(machine: HardwareProfile, device: str, memory_bytes: int | None = None) -> HardwareProfile:
    """The machine with the card that an emulated device stands for: its memory and link, this processor's speed.  One
    with a clock of its own has the speed of its data sheet, and so has its processor if the host's time is fixed.
    Cards of several kinds count as so many of the slowest, with the memory that there is of all.

    Args:
        memory_bytes: of one card, if it is not to use all of it.
    """
    kinds = [(read_profile(name), count) for name, count in map(emulated_cards, device.split(","))]
    count, cpu = sum(each for _, each in kinds), machine.cpu
    card = min((one for one, _ in kinds), key=lambda one: (one.card_gbps, one.link_h2d_gbps, -one.compute_slowdown))
    memory_bytes = memory_bytes or sum(one.vram_bytes * each for one, each in kinds) // count
    flops, bytes_per_s = cpu.flops / card.compute_slowdown, cpu.ram_bytes_per_s / card.compute_slowdown
    latency_s, calls, origins = card.link_latency_us / 1e6, machine.calls, dict(machine.origins)
    if card.has_clock:
        flops, bytes_per_s = card.card_tflops * 1e12, card.card_gbps * 1e9
        slower, modelled = card.cpu_slowdown, ["gpu.flops", "gpu.bytes_per_s", "link.h2d", "link.d2h"]
        rates = {threads: rate / slower for threads, rate in cpu.weights_bytes_per_s.items()}
        cpu = replace(
            cpu, flops=cpu.flops / slower, ram_bytes_per_s=cpu.ram_bytes_per_s / slower, weights_bytes_per_s=rates
        )
        if has_fixed_host(device):
            rate = card.cpu_gbps * 1e9
            cpu = CpuProfile(cpu.name, 1, card.cpu_tflops * 1e12, rate, cpu.ram_bytes, {1: rate})
            modelled += ["cpu.flops", "cpu.ram_bytes_per_s"]
        origins |= dict.fromkeys(modelled, Origin.MODELLED)
        call_s = card.call_us / 1e6
        calls = CallProfile(
            native_s=call_s if has_fixed_host(device) else calls.native_s,
            layer_s=latency_s + _CALLS_OF_LAYER * call_s,
            card_s=_CALLS_OF_CARD * call_s,
            host_s=_CALLS_OF_HOST * call_s,
            fetch_s=_CALLS_OF_FETCH * call_s,
            sum_s=_CALLS_OF_SUM * call_s,
            launch_s=card.launch_us / 1e6,
            flags_s=2 * latency_s + call_s,
        )
    gpu = GpuProfile(f"{EMULATED}{card.name}", memory_bytes, flops, bytes_per_s, count)
    h2d, d2h = card.link_h2d_gbps * 1e9, card.link_d2h_gbps * 1e9
    link = LinkProfile(h2d, d2h, h2d, latency_s, card.peer_gbps * 1e9)
    return replace(machine, cpu=cpu, gpu=gpu, link=link, calls=calls, origins=origins)
