"""The pages that are not built yet, each in two or three sentences."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.theme import ThemeController
from app.views.placeholder import PlaceholderPage

translate = QCoreApplication.translate


def make_unbuilt(index: int, theme: ThemeController) -> PlaceholderPage:
    """The page at that place of the sidebar: 1 Batch, 2 Monitor, 3 Tune, 4 Models."""
    texts = (
        (
            translate("UnbuiltPages", "Batch"),
            "batch",
            translate(
                "UnbuiltPages",
                "Drop a file of prompts here and get a file of answers back. Thousands of rows will run at the best "
                "rate the machine can give, and a job that was interrupted goes on where it stopped.",
            ),
        ),
        (
            translate("UnbuiltPages", "Monitor"),
            "monitor",
            translate(
                "UnbuiltPages",
                "Timelines of GPU, CPU, PCIe and disk on one axis, and what the expert cache is doing. In a sentence "
                "at the top: what the last tokens were waiting for, and what would help.",
            ),
        ),
        (
            translate("UnbuiltPages", "Tune"),
            "tune",
            translate(
                "UnbuiltPages",
                "Switchyard will measure this machine's memory, cores, disk and PCIe, plan where each part of the "
                "model belongs, and time real tokens. The fastest plan becomes the setting.",
            ),
        ),
        (
            translate("UnbuiltPages", "Models"),
            "models",
            translate(
                "UnbuiltPages",
                "Your model library: what is here, what fits this machine before it is downloaded, and how fast it "
                "would run. Until then, “switchyard models” on the command line does it.",
            ),
        ),
    )
    title, icon_name, text = texts[index - 1]
    return PlaceholderPage(title, icon_name, text, theme)
