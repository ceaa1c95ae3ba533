"""How far loading a model is, in words."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.services.loading_pace import LoadingPace
from app.widgets.quantities import SEPARATOR, duration, file_size

translate = QCoreApplication.translate


def loading_words(pace: LoadingPace) -> str:
    """What is done, how much of how much, and the time left, as far as they are known."""
    progress = pace.progress
    if progress is None:
        return translate("Loading", "Opening the model")
    words = {
        "reading": translate("Loading", "Reading weights"),
        "converting": translate("Loading", "Converting weights; later starts skip this"),
    }.get(progress.phase, translate("Loading", "Loading the model"))
    amount = translate("Loading", "{0} of {1}").format(file_size(progress.done), file_size(progress.total))
    left = translate("Loading", "{0} left").format(duration(pace.left_s)) if pace.left_s is not None else ""
    return SEPARATOR.join(filter(None, (words, amount, left)))
