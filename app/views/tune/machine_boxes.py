"""The machine as boxes and links, every number with its source."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QCoreApplication

from app.widgets.machine_picture import Box, BoxLine, Part, PictureLink
from app.widgets.quantities import arithmetic, memory, rate
from engine.hardware.disk import DiskKind
from engine.hardware.gpu_info import GpuInfo
from engine.hardware.machine import Origin
from engine.protocol import Measured, TuningNumber
from engine.tuning.machine_state import MachineLook

translate = QCoreApplication.translate
Found = Mapping[Measured, TuningNumber]
"""The best number of each kind that the current run has measured."""

PART_OF: dict[Measured, Part] = {
    "ram": "ram",
    "cpu_flops": "cpu",
    "cpu_experts": "cpu",
    "gpu_flops": "gpu",
    "gpu_memory": "gpu",
    "gpu_experts": "gpu",
    "h2d": "gpu",
    "d2h": "gpu",
    "disk": "disk",
}
"""The box that a number belongs to."""

_SETS = (
    ("avx512_vnni", "AVX-512 VNNI"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
    ("asimd", "NEON"),
)


def machine_boxes(look: MachineLook, found: Found) -> tuple[tuple[Box, ...], tuple[PictureLink, ...]]:
    boxes = (_gpu(look, found), _cpu(look, found), _ram(look), _disk(look))
    return boxes, tuple(
        link for link in (_card_link(look, found), _ram_link(look, found), _disk_link(look, found)) if link
    )


def driver_trouble(look: MachineLook) -> str:
    note = look.probe.gpu_note
    return "" if note in _NO_DRIVER else note


def origin_words(origin: Origin | None) -> str:
    return {
        Origin.MEASURED: translate("Tune", "measured on this machine"),
        Origin.DRIVER: translate("Tune", "reported by the driver or the system"),
        Origin.ASSUMED: translate("Tune", "assumed, from data sheets"),
    }.get(origin or Origin.ASSUMED, "")


_NO_DRIVER = ("", "No NVIDIA driver was found.", "The NVIDIA driver lists no graphics card.")
"""Not worth a warning: most such machines have no card."""


class _Numbers:
    def __init__(self, look: MachineLook, found: Found) -> None:
        self._origins, self._found = look.profile.origins, found

    def is_measured(self, path: str, *what: Measured) -> bool:
        return any(one in self._found for one in what) or self._origins.get(path) is Origin.MEASURED

    def value(self, kept: float, *what: Measured) -> float:
        fresh = [self._found[one].value for one in what if one in self._found]
        return max(fresh) if fresh else kept

    def line(self, path: str, kept: float, *what: Measured, flops: bool = False, words: str = "{0}") -> BoxLine:
        value = self.value(kept, *what)
        fresh = any(one in self._found for one in what)
        origin = Origin.MEASURED if fresh else self._origins.get(path, Origin.ASSUMED)
        text = arithmetic(value) if flops else rate(value)
        if origin is Origin.ASSUMED:
            text = translate("Tune", "about {0}").format(text)
        said = translate("Tune", "just measured") if fresh else origin_words(origin)
        return BoxLine(words.format(text), said)


def _gpu(look: MachineLook, found: Found) -> Box:
    gpu, numbers = look.profile.gpu, _Numbers(look, found)
    cards = [card for card in look.probe.gpus if not card.is_integrated]
    source = origin_words(Origin.DRIVER)
    if gpu is None:
        integrated = next((card for card in look.probe.gpus if card.is_integrated), None)
        note = look.probe.gpu_note
        lines = [BoxLine(translate("Tune", "The CPU computes everything."))]
        if note and not driver_trouble(look):
            lines.append(BoxLine(note, source))
        if integrated is not None:
            lines.append(BoxLine(translate("Tune", "{0} is part of the processor").format(integrated.name), source))
        return Box("gpu", translate("Tune", "No graphics card"), tuple(lines), is_there=False)
    lines = [BoxLine(gpu.name, source), BoxLine(_card_memory(look), source)]
    speed = numbers.line("gpu.bytes_per_s", gpu.bytes_per_s, "gpu_memory")
    power = numbers.line("gpu.flops", gpu.flops, "gpu_flops", flops=True)
    lines.append(BoxLine(f"{speed.text} · {power.text}", _joined(speed, power)))
    if not look.device and look.measurements is not None:
        lines.append(BoxLine(translate("Tune", "not used by the engine"), translate("Tune", "reported by the engine")))
    elif len(cards) > 1:
        others = ", ".join(card.name for card in cards[1:])
        lines.append(BoxLine(translate("Tune", "and {0} more: {1}").format(len(cards) - 1, others), source))
    else:
        lines += _slot(cards[0] if cards else None, source)
    return Box("gpu", translate("Tune", "GPU"), tuple(lines), count=max(1, len(cards)))


def _card_memory(look: MachineLook) -> str:
    assert look.profile.gpu is not None
    total, gpu = memory(look.profile.gpu.memory_bytes), look.probe.compute_gpu
    if look.device.startswith("emulated"):
        return translate("Tune", "{0}, emulated in RAM").format(total)
    if gpu is None or gpu.free_bytes is None:
        return total
    return translate("Tune", "{0}, {1} free").format(total, memory(gpu.free_bytes))


def _slot(card: GpuInfo | None, source: str) -> list[BoxLine]:
    if card is None or not card.driver:
        return []
    return [BoxLine(translate("Tune", "driver {0}").format(card.driver), source)]


def _cpu(look: MachineLook, found: Found) -> Box:
    probe, cpu, numbers = look.probe, look.profile.cpu, _Numbers(look, found)
    source = origin_words(Origin.DRIVER)
    cores = (
        translate("Tune", "1 core")
        if cpu.cores == 1
        else translate("Tune", "{0} cores", "", cpu.cores).format(cpu.cores)
    )
    vector = next((name for flag, name in _SETS if flag in probe.instructions), "")
    lines = [BoxLine(_plain_name(cpu.name), source), BoxLine(f"{cores} · {vector}" if vector else cores, source)]
    lines.append(numbers.line("cpu.flops", cpu.flops, "cpu_flops", flops=True))
    if cpu.weights_bytes_per_s:
        best = max(cpu.weights_bytes_per_s, key=lambda threads: cpu.weights_bytes_per_s[threads])
        words = (
            translate("Tune", "best with 1 thread")
            if best == 1
            else translate("Tune", "best with {0} threads", "", best).format(best)
        )
        lines.append(BoxLine(words, origin_words(Origin.MEASURED)))
    return Box("cpu", translate("Tune", "CPU"), tuple(lines))


def _ram(look: MachineLook) -> Box:
    probe, measured = look.probe, look.measurements
    source = origin_words(Origin.DRIVER)
    lines = [
        BoxLine(
            translate("Tune", "{0}, {1} free").format(memory(probe.ram_bytes), memory(probe.ram_available_bytes)),
            source,
        )
    ]
    limit = probe.where.memory_limit_bytes if probe.where is not None else None
    if limit is not None and limit <= probe.ram_bytes:
        lines.append(BoxLine(translate("Tune", "the container's limit"), source))
    if probe.where is not None and probe.where.wsl:
        lines.append(BoxLine(translate("Tune", "the limit set for WSL"), source))
    pinned = measured.pinned_limit_bytes if measured is not None else None
    if look.profile.gpu is not None and pinned:
        lines.append(BoxLine(translate("Tune", "pinnable: {0}").format(memory(pinned)), origin_words(Origin.MEASURED)))
    return Box("ram", translate("Tune", "RAM"), tuple(lines))


def _disk(look: MachineLook) -> Box:
    disk, source = look.probe.models_disk, origin_words(Origin.DRIVER)
    if disk is None:
        silent = BoxLine(translate("Tune", "It does not respond."), source)
        return Box("disk", translate("Tune", "Disk"), (silent,), is_there=False)
    known = [disk.model] if disk.model else [name for name in (disk.device, disk.file_system) if name]
    kind = ", ".join((_disk_kind(disk.kind), *known))
    lines: tuple[BoxLine, ...] = (BoxLine(kind[:1].upper() + kind[1:], source),)
    if disk.free_bytes is not None:
        lines += (BoxLine(translate("Tune", "{0} free").format(memory(disk.free_bytes)), source),)
    return Box("disk", translate("Tune", "Disk"), lines)


def _disk_kind(kind: DiskKind) -> str:
    return {
        DiskKind.NVME: "NVMe",
        DiskKind.SSD: "SSD",
        DiskKind.HDD: translate("Tune", "hard disk"),
        DiskKind.NETWORK: translate("Tune", "network share"),
        DiskKind.MEMORY: translate("Tune", "in memory"),
        DiskKind.HOST: translate("Tune", "disk of the host"),
        DiskKind.UNKNOWN: translate("Tune", "disk"),
    }[kind]


def _card_link(look: MachineLook, found: Found) -> PictureLink | None:
    if look.profile.gpu is None:
        return None
    link, numbers = look.profile.link, _Numbers(look, found)
    up = numbers.line("link.h2d", link.h2d, "h2d", words=translate("Tune", "{0} up"))
    down = numbers.line("link.d2h", link.d2h, "d2h", words=translate("Tune", "{0} down"))
    labels = [up, down]
    card = look.probe.compute_gpu if not look.device.startswith("emulated") else None
    if card is not None and card.pcie_generation:
        width = f" ×{card.pcie_width_now or card.pcie_width}" if card.pcie_width_now or card.pcie_width else ""
        up = BoxLine(f"PCIe {card.pcie_generation}.0{width}, {up.text}", up.origin)
        labels = [up, down]
    return PictureLink("gpu", numbers.value(link.h2d, "h2d"), tuple(labels), numbers.is_measured("link.h2d", "h2d"))


def _ram_link(look: MachineLook, found: Found) -> PictureLink:
    cpu, numbers = look.profile.cpu, _Numbers(look, found)
    what: tuple[Measured, ...] = ("ram",)
    line = numbers.line("cpu.ram_bytes_per_s", cpu.ram_bytes_per_s, *what)
    labels = (line, BoxLine(translate("Tune", "reading RAM"), line.origin))
    value = numbers.value(cpu.ram_bytes_per_s, *what)
    return PictureLink("cpu", value, labels, numbers.is_measured("cpu.ram_bytes_per_s", *what))


def _disk_link(look: MachineLook, found: Found) -> PictureLink:
    numbers, kept = _Numbers(look, found), look.profile.disk_bytes_per_s
    line = numbers.line("disk_bytes_per_s", kept, "disk")
    return PictureLink("disk", numbers.value(kept, "disk"), (line,), numbers.is_measured("disk_bytes_per_s", "disk"))


def _joined(*lines: BoxLine) -> str:
    said = dict.fromkeys(line.origin for line in lines)
    return " · ".join(said)


def _plain_name(name: str) -> str:
    for mark in ("(R)", "(TM)", "(r)", "(tm)"):
        name = name.replace(mark, "")
    return " ".join(name.split())
