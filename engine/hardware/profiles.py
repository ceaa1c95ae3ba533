"""Profiles of graphics cards for emulated devices: JSON files in `resources/hardware`.

{"name": "slow-link", "description": "...", "vram_bytes": 4000000000, "link_h2d_gbps": 2.0,
 "link_d2h_gbps": 2.0, "link_latency_us": 20.0, "compute_slowdown": 1.0}

`resources/emulated_machines.json` has cards with a clock of their own, and what processor is beside them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import resources_dir
from engine.common.untrusted import parse_json, read_untrusted, reason
from engine.hardware.machine import CallProfile, CpuProfile, GpuProfile, HardwareProfile, LinkProfile, Origin

EMULATED = "emulated:"
"""What the names of emulated devices begin with."""
_SEVERAL = re.compile(r"(.+)x(\d+)", re.ASCII)
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A card and its link to the host.

    Attributes:
        name: the file name without `.json`.
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


# Plausible for any card of the next decades; a number outside is probably in the wrong unit.
_RANGES: dict[str, tuple[float, float]] = {
    "vram_bytes": (2**20, 2**42),
    "link_h2d_gbps": (0.001, 2000),
    "link_d2h_gbps": (0.001, 2000),
    "link_latency_us": (0, 100_000),
    "compute_slowdown": (1, 1000),
    "card_gbps": (1, 100_000),
    "card_tflops": (0.01, 100_000),
    "launch_us": (0, 1000),
    "peer_gbps": (0, 2000),
    "call_us": (0, 1000),
    "cpu_slowdown": (0.01, 100),
    "cpu_gbps": (0.1, 10_000),
    "cpu_tflops": (0.001, 1000),
}
_TEXTS = ("name", "description")
_REQUIRED = 6
_OPTIONAL = tuple(field.name for field in fields(DeviceProfile)[_REQUIRED:])
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


def profiles_dir() -> Path:
    """Folder of the profiles shipped with the program."""
    return resources_dir() / "hardware"


def profile_names(folder: Path | None = None) -> list[str]:
    """Names of all profiles, sorted."""
    return sorted(path.stem for path in (folder or profiles_dir()).glob("*.json"))


def read_profile(name: str, folder: Path | None = None) -> DeviceProfile:
    """The profile of this name.

    Raises:
        EngineError: `INVALID_REQUEST` if there is none, or its file has invalid values.
    """
    if folder is None and name in _lent:
        return _lent[name]
    if folder is None and (timed := next((one for one in timed_profiles() if one.name == name), None)) is not None:
        return timed
    folder = folder or profiles_dir()
    names = profile_names(folder)
    if name not in names:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"There is no hardware profile called {name!r} in {folder}: use one of {', '.join(names) or '(none)'}.",
        )
    path = folder / f"{name}.json"
    try:
        content = parse_json(read_untrusted(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read ({reason(error)})") from None
    if not isinstance(content, dict):
        raise _refused(path, "is not a JSON object")
    return _checked(content, path)


def timed_profiles() -> list[DeviceProfile]:
    """The machines whose cards have a clock of their own.

    Raises:
        EngineError: as `read_profile`.
    """
    path = resources_dir() / "emulated_machines.json"
    try:
        content = parse_json(read_untrusted(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read ({reason(error)})") from None
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise _refused(path, "is not a list of JSON objects")
    return [_checked(one, path, named_by_file=False) for one in content]


def has_fixed_host(device: str) -> bool:
    """Whether the host's time is modelled as well: `emulated:NAME?host=fixed`."""
    return device.endswith((_FIXED_HOST, _ONLY_HOST))


def of_machine(device: str) -> DeviceProfile:
    """The card of `emulated:NAME`; with `?host=only`, the processor beside it, as if it were a card with all of RAM.

    Raises:
        EngineError: as `read_profile`.
    """
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
    names = {*profile_names(), *(one.name for one in timed_profiles())}
    if which in names or several[1] not in names:
        return which, 1
    return several[1], int(several[2][:9])


def with_emulated(machine: HardwareProfile, device: str, memory_bytes: int | None = None) -> HardwareProfile:
    """The machine with the card that an emulated device stands for: its memory and link, this processor's speed.  One
    with a clock of its own has the speed of its data sheet, and so has its processor if the host's time is fixed.
    Cards of several kinds count as so many of the slowest, with the memory that there is of all.

    Args:
        memory_bytes: of one card, if it is not to use all of it.

    Raises:
        EngineError: as `read_profile`.
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


def _checked(content: dict[str, object], path: Path, *, named_by_file: bool = True) -> DeviceProfile:
    known = [field.name for field in fields(DeviceProfile)]
    if unknown := sorted(content.keys() - set(known)):
        raise _refused(path, f"has an unknown field {unknown[0]!r}; known fields are {', '.join(known)}")
    values: dict[str, object] = {}
    for field in known:
        if field not in content:
            if field in _OPTIONAL:
                continue
            raise _refused(path, f"lacks the field {field!r}")
        values[field] = (
            _checked_text(content, field, path) if field in _TEXTS else _checked_number(content, field, path)
        )
    if named_by_file and values["name"] != path.stem:
        raise _refused(path, f"has {values['name']!r} in 'name', but its file is called {path.stem!r}")
    return DeviceProfile(**values)  # type: ignore[arg-type]


def _checked_text(content: dict[str, object], field: str, path: Path) -> str:
    value = content[field]
    if not isinstance(value, str) or not value.strip():
        raise _refused(path, f"has no text in {field!r}, but {_shown(value)}")
    return value


def _checked_number(content: dict[str, object], field: str, path: Path) -> float:
    value = content[field]
    low, high = _RANGES[field]
    whole = field.endswith("_bytes")
    kind = "a whole number" if whole else "a number"
    # bool is an int to Python, and JSON as Python reads it has NaN.
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise _refused(path, f"has {_shown(value)} in {field!r}, which must be {kind} from {low:g} to {high:g}")
    if not low <= value <= high or not math.isfinite(value):
        raise _refused(path, f"has {_shown(value)} in {field!r}, which must be {kind} from {low:g} to {high:g}")
    return value if whole else float(value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _refused(path: Path, what: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, f"The hardware profile {path} {what}: fix it or use another profile.")
