"""What each lane of the timeline shows, for somebody who has never heard of experts."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

translate = QCoreApplication.translate


def lane_explanation(key: str) -> str:
    """Two sentences on a lane, by its key; of the machine's own lanes one text for all; empty for one nobody knows."""
    known = {
        "phase": translate(
            "Timeline",
            "What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a step "
            "of a batch, which takes one sweep through the model for many rows at once. Each tick is a token, which is "
            "a word or a part of one.",
        ),
        "gpu": translate(
            "Timeline",
            "How busy the graphics card is with our model. Gaps mean that it waits for something else, usually for "
            "weights to arrive or for the processor.",
        ),
        "h2d": translate(
            "Timeline",
            "Weights on their way from RAM to the graphics card. This is the price of a miss: an expert that is "
            "needed and not in the card's memory yet.",
        ),
        "d2h": translate(
            "Timeline",
            "What goes back from the graphics card to RAM, mostly small results. Large amounts here are memory of a "
            "batch that has no room on the card.",
        ),
        "cpu": translate(
            "Timeline",
            "How busy the processor is with our model: with experts, the parts of a layer of which each token uses "
            "only a few, and with attention, which looks back at the text so far. Both together can fill the lane.",
        ),
        "disk": translate(
            "Timeline",
            "Experts that are read from disk because RAM has no room for them. If this lane is often full, more RAM "
            "or a smaller precision helps most.",
        ),
        "experts": translate(
            "Timeline",
            "Where the experts that were needed were found: in the card's memory (a hit), brought there first "
            "(fetched, a miss), or computed on the processor instead. More hits mean less waiting; without a graphics "
            "card everything is computed on the processor.",
        ),
        "tokens": translate(
            "Timeline",
            "How many tokens are written each second while the model is at work. A batch counts the tokens of all its "
            "rows, also those of prompts that it reads.",
        ),
    }
    if key in known:
        return known[key]
    if key == "cpu_all":
        return translate(
            "Timeline",
            "How busy the whole processor is: filled for Switchyard, dashed for all programs together. A wide gap "
            "between both is what other programs take away.",
        )
    return _machine_words(key)


def _machine_words(key: str) -> str:
    plain = {
        "gpu_busy": translate("Timeline", "How busy the graphics card is, whoever uses it."),
        "ram": translate("Timeline", "Memory in use: filled for Switchyard, dashed for all programs together."),
        "vram": translate("Timeline", "The card's memory in use: filled for Switchyard, dashed for all programs."),
        "pcie": translate("Timeline", "What crosses the slot of the graphics card, both ways, whoever sends it."),
        "faults": translate(
            "Timeline", "Pieces of memory that the system had to provide first: many slow things down."
        ),
        "disk_io": translate("Timeline", "What is read from the disk and (dashed) written to it, whoever does it."),
        "gpu_power": translate("Timeline", "The power that the graphics card draws."),
        "cpu_power": translate("Timeline", "The power that the processor draws."),
        "gpu_clock": translate("Timeline", "The clock of the graphics card: it falls when the card is too hot."),
        "cpu_clock": translate("Timeline", "The clock of the processor: it falls when it is too hot or saves power."),
        "gpu_temperature": translate("Timeline", "How hot the graphics card is."),
        "cpu_temperature": translate("Timeline", "How hot the processor is."),
    }
    if key not in plain:
        return ""
    told = translate("Timeline", "It comes from a sensor or driver, not from the engine.")
    return f"{plain[key]} {told}"
