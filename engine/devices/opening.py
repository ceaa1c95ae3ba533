"""Opens the devices named by `--device`.

Apple's graphics, through `torch.mps`, share the processor's memory, so nothing is copied to them, or cached.  A model
runs there with all of its experts where they lie, or on the CPU.  There is one queue of work, and no way to order other
work with it but to wait.  Not yet run on such a machine.

Intel's cards come through `torch.xpu`, and have not yet run on one.  Their decode steps are not captured: torch's
graphs for them are too new to be trusted unproven.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterable
from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.card import HEADROOM_BYTES, CardKind, hard_fraction, open_card
from engine.devices.cpu import InlineStream, open_cpu
from engine.devices.cuda import CUDA
from engine.devices.device import ROLES, CopyLog, Device, Direction, Event
from engine.devices.emulated import open_emulated
from engine.devices.host_memory import HostMemory, aligned, available_ram
from engine.devices.memory_budget import MemoryBudget
from engine.hardware.profiles import emulated_cards, has_fixed_host, of_machine, profile_names

_LEAST_FRACTION = 0.01
"""To torch a limit of 0 is none."""


class AppleCards:
    """`torch.mps` with the names that other kinds of cards have in torch."""

    def __init__(self, mps: Any) -> None:
        self.mps = mps

    def is_available(self) -> bool:
        return bool(self.mps.is_available())

    def device_count(self) -> int:
        return int(self.mps.device_count())

    def get_device_name(self, _index: int) -> str:
        return "Apple graphics"

    def get_arch_list(self) -> list[str]:
        return ["Metal"]  # torch makes their code at run time


class AppleStream(InlineStream):
    """An event is done when the work is, which is waited for: little is submitted where nothing is copied."""

    def __init__(self, name: str, copy_log: CopyLog, synchronize: Callable[[], None]) -> None:
        super().__init__(name, copy_log)
        self._synchronize = synchronize

    def _run(self, work: Callable[[], object], copied: tuple[Direction, int] | None = None) -> Event:
        def done() -> None:
            work()
            self._synchronize()

        return super()._run(done, copied)


def open_apple(kind: CardKind, index: int, vram_bytes: int | None) -> Device:
    """Opens the graphics of a chip of Apple's; without a budget, with what the system recommends and RAM has free."""
    mps: Any = kind.torch.mps
    name, place = f"{kind.name}:{index}", torch.device(kind.name, index)
    most = mps.recommended_max_memory()
    usable = max(0, min(most - mps.driver_allocated_memory(), available_ram()) - HEADROOM_BYTES)
    budget = usable if vram_bytes is None else min(usable, vram_bytes)
    mps.set_per_process_memory_fraction(max(_LEAST_FRACTION, hard_fraction(budget, most)))
    log = CopyLog()
    return Device(
        name=name,
        torch_device=place,
        memory=MemoryBudget(name, budget, lambda nbytes: aligned(nbytes, place)),
        host_memory=HostMemory(),
        streams=tuple(AppleStream(f"{name} {role}", log, mps.synchronize) for role in ROLES),
        copy_log=log,
        compute_follows_caller=True,
        is_unified=True,
        identity=kind.identity(index),
    )


def _apple_identity(_index: int) -> str:
    """What times depend on: the chip, its memory and the system."""
    return f"{platform.processor() or platform.machine()} macOS {platform.mac_ver()[0]} Metal"


MPS = CardKind(
    "mps",
    AppleCards(torch.mps),
    lambda _place: HostMemory(),
    _apple_identity,
    is_built=lambda: bool(torch.backends.mps.is_built()),
    opens=open_apple,
    is_automatic=False,
)


def identity_of(index: int) -> str:
    """What times depend on: the card, its memory and its driver.  Its link is not known to torch."""
    properties = torch.xpu.get_device_properties(index)
    driver = getattr(properties, "driver_version", "")
    return f"{properties.name} {properties.total_memory >> 20} MiB driver {driver} XPU".replace("driver  ", "")


XPU = CardKind(
    "xpu",
    torch.xpu,
    lambda _place: HostMemory(),
    identity_of,
    is_built=lambda: getattr(torch.version, "xpu", None) is not None,
    variables=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
)


MOST_EMULATED = 8
"""Most emulated devices: each uses host memory."""


CARD_KINDS: dict[str, CardKind] = {kind.name: kind for kind in (CUDA, XPU, MPS)}
"""By their names in `--device`; the first that is there is what `auto` means, if it may be."""


def automatic() -> str:
    """What `auto` means: a kind of card that torch can use, or `cpu`."""
    return next((name for name, kind in CARD_KINDS.items() if kind.is_automatic and kind.count()), "cpu")


def card_count(spec: str) -> int:
    """Number of cards that a name without a number means; 1 for all other names."""
    kind = CARD_KINDS.get(automatic() if spec == "auto" else spec)
    return 1 if kind is None else max(1, kind.count())


def open_automatic(vram_bytes: int | None = None) -> tuple[list[Device], str]:
    """What `auto` means: the cards of the first kind of which one can be used; the caller closes them.

    Returns:
        The cards, none if that is the CPU; and a sentence on those that cannot be used, or nothing to say.
    """
    for kind in (kind for kind in CARD_KINDS.values() if kind.is_automatic):
        devices, refused = [], []
        for index in range(kind.count()):
            try:
                devices.append(open_card(kind, index, vram_bytes))
            except EngineError as error:
                refused.append(error.message)
        if devices or refused:
            return devices, refused[0] if refused else ""
    return [], next(filter(None, (kind.hidden() for kind in CARD_KINDS.values())), "")


def open_devices(spec: str, vram_bytes: int | None = None) -> list[Device]:
    """Opens the devices named by `spec`; the caller closes them.

    Args:
        spec: `cpu`, `cuda` (every card), `cuda:1`, `xpu` and `mps` likewise, `emulated:NAME`, `emulated:NAMEx2` (two)
            or `emulated:NAME#1` (the second of several); with `?host=fixed` the time of the host beside a card with a
            clock of its own is modelled, too, and with `?host=only` it is the host alone; several with commas.
        vram_bytes: memory budget of each device; ignored for `cpu`.

    Raises:
        EngineError: `INVALID_REQUEST` if the name is unknown, `DEVICE_UNAVAILABLE` if this machine has no such device.
    """
    if "," in spec:
        with contextlib.ExitStack() as opened:
            devices = [
                opened.enter_context(device) for one in spec.split(",") for device in open_devices(one, vram_bytes)
            ]
            if len({device.name for device in devices}) < len(devices):
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{spec} has a card twice: several alike are NAMEx2.")
            if len({device.meter is None for device in devices}) > 1:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{spec}: cards with a data sheet stand beside no others.")
            opened.pop_all()
        return devices
    kind, colon, which = spec.partition(":")
    if spec == "cpu":
        return [open_cpu()]
    cards = CARD_KINDS.get(kind)
    if cards is not None and (not colon or (which.isascii() and which.isdecimal())):
        # Without a card, opening number 0 raises the right error.
        indices = [int(which)] if colon else list(range(cards.count())) or [0]
        return _open_all(lambda index: open_card(cards, index, vram_bytes), indices)
    if kind == "emulated" and which:
        _, count = emulated_cards(spec)
        number = which.partition("#")[2].partition("?")[0]
        first = int(number) if number.isascii() and number.isdecimal() else 0
        if not 1 <= count <= MOST_EMULATED:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{spec} would be {count} devices: use 1 to {MOST_EMULATED}.")
        profile, is_fixed = of_machine(spec), has_fixed_host(spec)
        return _open_all(
            lambda index: open_emulated(profile, index, vram_bytes, is_fixed=is_fixed), range(first, first + count)
        )
    raise EngineError(
        ErrorCode.INVALID_REQUEST,
        f"There is no device called {spec!r}: use cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER, mps or "
        f"emulated:NAME, where NAME is one of {', '.join(profile_names())}.",
    )


def _open_all(open_one: Callable[[int], Device], indices: Iterable[int]) -> list[Device]:
    """Opens all or none."""
    with contextlib.ExitStack() as opened:
        devices = [opened.enter_context(open_one(index)) for index in indices]
        opened.pop_all()
    return devices
