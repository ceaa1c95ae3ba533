"""What was found of this PC, in plain words."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.widgets.quantities import count, file_size, memory
from engine.tuning.machine_look import MachineLook

translate = QCoreApplication.translate


def parts_words(look: MachineLook) -> str:
    """The parts that matter, a line each."""
    lines, probe = [], look.probe
    gpu = probe.compute_gpu
    if gpu is not None:
        has = translate("FirstRun", "{0} with {1}")
        lines.append(has.format(gpu.name, memory(gpu.total_bytes)) if gpu.total_bytes else gpu.name)
    cores = probe.physical_cores or probe.usable_cpus
    counted = translate("FirstRun", "1 core") if cores == 1 else translate("FirstRun", "{0} cores").format(count(cores))
    lines.append(translate("FirstRun", "{0} of RAM, {1}").format(memory(probe.ram_bytes), counted))
    if look.free_for_files:
        free = file_size(look.free_for_files)
        lines.append(translate("FirstRun", "{0} free on the disk for models").format(free))
    return "\n".join(lines)


def meaning_words(look: MachineLook) -> str:
    """What that means for models."""
    probe, gpu = look.probe, look.probe.compute_gpu
    room = probe.ram_available_bytes + ((gpu.free_bytes or 0) if gpu is not None and look.device else 0)
    fits = translate(
        "FirstRun",
        "Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which "
        "takes longer.",
    ).format(memory(room))
    if gpu is not None and look.device:
        return translate("FirstRun", "Graphics card and processor share the work.") + " " + fits
    if gpu is not None:
        return translate("FirstRun", "The graphics card cannot be used here: the processor does the work.") + " " + fits
    return translate("FirstRun", "There is no graphics card for models: the processor does the work.") + " " + fits
