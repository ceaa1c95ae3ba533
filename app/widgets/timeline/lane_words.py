"""What each lane of the timeline shows, for a reader who is new to experts."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

translate = QCoreApplication.translate


def lane_explanation(key: str) -> str:
    """Two sentences on a lane, by its key; the machine's lanes share the second; empty for an unknown lane."""
    known = {
        "phase": translate(
            "Timeline",
            "What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a "
            "batch step, which takes many rows through the model at once. Each tick is a token: a word or a part of "
            "one.",
        ),
        "requests": translate(
            "Timeline",
            "A row for each answer that is being worked on, for this window or other programs, here or at another "
            "server: waiting (hatched), its prompt being read (pale), its answer being written. A batch job has a row, "
            "too (outlined).",
        ),
        "sweeps": translate(
            "Timeline",
            "What goes through the layers together: one token of each answer that is being written, and (hatched) "
            "pieces of prompts that are being read. Batch jobs have sweeps of their own. From close up each sweep is a "
            "block with its tokens.",
        ),
        "gpu": translate(
            "Timeline",
            "How busy the graphics card is with our model. In gaps it waits for something else, usually for "
            "weights or for the processor.",
        ),
        "h2d": translate(
            "Timeline",
            "Weights being copied from RAM to the graphics card. This is the cost of a miss: an expert that is "
            "needed but not in the card's memory.",
        ),
        "d2h": translate(
            "Timeline",
            "Copies from the graphics card to RAM, mostly small results. Large amounts are a batch's data that "
            "has no room on the card.",
        ),
        "cpu": translate(
            "Timeline",
            "How busy the processor is with our model: with experts, the parts of a layer of which each token uses "
            "only a few, and with attention, which looks back at the text so far. Together they can fill the lane.",
        ),
        "disk": translate(
            "Timeline",
            "Experts being read from disk because RAM has no room for them. If this lane is often full, more RAM "
            "or a lower precision helps most.",
        ),
        "experts": translate(
            "Timeline",
            "Where the needed experts were: in the card's memory (a hit), copied there first (fetched, a miss), or "
            "computed on the processor instead. More hits mean less waiting; without a graphics card everything is "
            "computed on the processor.",
        ),
        "tokens": translate(
            "Timeline",
            "How many tokens per second are written while the model is working. For a batch this counts the tokens "
            "of all rows, including their prompts.",
        ),
    }
    if key in known:
        return known[key]
    if key == "cpu_all":
        return translate(
            "Timeline",
            "How busy the whole processor is: filled for Switchyard, dashed for all programs. A wide gap between "
            "the two is what other programs use.",
        )
    return _machine_words(key)


def _machine_words(key: str) -> str:
    plain = {
        "gpu_busy": translate("Timeline", "How busy the graphics card is, for all programs."),
        "ram": translate("Timeline", "Memory in use: filled for Switchyard, dashed for all programs."),
        "vram": translate("Timeline", "The card's memory in use: filled for Switchyard, dashed for all programs."),
        "pcie": translate("Timeline", "Traffic on the graphics card's slot, both ways, of all programs."),
        "faults": translate("Timeline", "Memory pages that the system had to map first: many slow things down."),
        "disk_io": translate("Timeline", "Reads from the disk and (dashed) writes to it, of all programs."),
        "gpu_power": translate("Timeline", "The power that the graphics card draws."),
        "cpu_power": translate("Timeline", "The power that the processor draws."),
        "gpu_clock": translate("Timeline", "The graphics card's clock rate: it falls when the card is too hot."),
        "cpu_clock": translate("Timeline", "The processor's clock rate: it falls when too hot or saving power."),
        "gpu_temperature": translate("Timeline", "How hot the graphics card is."),
        "cpu_temperature": translate("Timeline", "How hot the processor is."),
    }
    if key not in plain:
        return ""
    source = translate("Timeline", "This comes from a sensor or driver, not from the engine.")
    return f"{plain[key]} {source}"
