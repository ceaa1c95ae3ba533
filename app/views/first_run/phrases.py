"""What was found of this PC, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication

from app.services.engine_part import PartStage
from app.widgets.quantities import count, file_size, memory
from engine.tuning.machine_state import MachineLook

if TYPE_CHECKING:
    from engine.parts.wheels import EngineChoice

translate = QCoreApplication.translate


def parts_words(look: MachineLook) -> str:
    lines, probe = [], look.probe
    gpu = probe.compute_gpu
    if gpu is not None:
        has = translate("FirstRun", "{0} with {1}")
        lines.append(has.format(gpu.name, memory(gpu.total_bytes)) if gpu.total_bytes else gpu.name)
    cores = probe.physical_cores or probe.usable_cpus
    counted = (
        translate("FirstRun", "1 core")
        if cores == 1
        else translate("FirstRun", "{0} cores", "", cores).format(count(cores))
    )
    lines.append(translate("FirstRun", "{0} of RAM, {1}").format(memory(probe.ram_bytes), counted))
    if look.free_for_files:
        free = file_size(look.free_for_files)
        lines.append(translate("FirstRun", "{0} free on the disk for models").format(free))
    return "\n".join(lines)


def meaning_words(look: MachineLook) -> str:
    probe, gpu = look.probe, look.probe.compute_gpu
    room = probe.ram_available_bytes + ((gpu.free_bytes or 0) if gpu is not None and look.device else 0)
    fits = translate(
        "FirstRun",
        "Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which "
        "takes longer.",
    ).format(memory(room))
    if probe.lacks_avx2:
        old = translate("FirstRun", "This processor has no AVX2: everything works, but takes several times as long.")
        fits = f"{fits} {old}"
    if gpu is not None and look.device:
        return translate("FirstRun", "Graphics card and processor share the work.") + " " + fits
    if gpu is not None:
        return translate("FirstRun", "The graphics card cannot be used here: the processor does the work.") + " " + fits
    return translate("FirstRun", "There is no graphics card for models: the processor does the work.") + " " + fits


def engine_words(choice: EngineChoice | None) -> tuple[str, str]:
    """(what is fetched for this PC, why that)."""
    if choice is None:
        return translate("FirstRun", "Looking at this PC…"), ""
    cards = "; ".join(choice.cards) or translate("FirstRun", "no graphics card that PyTorch can use")
    if choice.reused is not None:
        words = translate("FirstRun", "Found: {0}. Everything is here already, and is prepared for this version.")
        return words.format(cards), choice.why
    sizes = file_size(choice.download_bytes), file_size(choice.unpacked_bytes)
    comes = translate("FirstRun", "It is fetched once: {0}, about {1} on the disk when it is unpacked.").format(*sizes)
    if choice.why:
        suits = translate("FirstRun", "The engine with PyTorch for {0} suits this PC.").format(choice.build_name)
    else:
        suits = translate("FirstRun", "Found: {0}. The engine comes with PyTorch for {1}.")
        suits = suits.format(cards, choice.build_name)
    return f"{suits} {comes}", choice.why


def step_words(stage: PartStage, step: str) -> str:
    if stage is not PartStage.INSTALLING:
        return ""
    return {
        "checking": translate("FirstRun", "Checking what was fetched…"),
        "unpacking": translate("FirstRun", "Unpacking…"),
        "testing": translate("FirstRun", "Testing it on this PC…"),
        "finishing": translate("FirstRun", "Finishing…"),
    }.get(step, translate("FirstRun", "Installing…"))
