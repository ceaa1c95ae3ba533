"""The Models page, which is not built yet, in three sentences."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.views.placeholder import PlaceholderPage

translate = QCoreApplication.translate


def models_placeholder() -> PlaceholderPage:
    """What will be there, and what does its work until then."""
    text = translate(
        "ModelsPlaceholder",
        "Your model library: what is here, what fits this machine before it is downloaded, and how fast it would run. "
        "Until then, “switchyard models” on the command line does it, and Tune says whether a model would fit.",
    )
    return PlaceholderPage(translate("ModelsPlaceholder", "Models"), "models", text)
