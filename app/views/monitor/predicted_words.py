"""A prediction in words: its speed and its assumptions."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication

from app.services.predicted_timeline import Predicted
from app.widgets.quantities import number
from app.widgets.timeline.viewport import duration

translate = QCoreApplication.translate


def speeds(predicted: Predicted, measured_tokens_per_s: float | None) -> str:
    """`154 tokens/s predicted, 98.1 measured · first token after 60 ms`."""
    speed = translate("Predicted", "{0} tokens/s predicted").format(number(predicted.tokens_per_s, 1))
    if measured_tokens_per_s:
        speed += ", " + translate("Predicted", "{0} measured").format(number(measured_tokens_per_s, 1))
    first = translate("Predicted", "first token after {0}").format(duration(predicted.ttft_s * 1e9))
    return f"{speed} · {first}"


def assumptions(predicted: Predicted) -> str:
    """Its assumptions, in one or two lines."""
    shape = predicted.shape
    parts = [
        translate("Predicted", "Simulated for {0} tokens read and {1} written, aligned at the same step.").format(
            number(shape.prompt_tokens, 0), number(shape.tokens, 0)
        )
    ]
    if predicted.measured:
        parts.append(translate("Predicted", "Measured here: {0}.").format(_named(predicted.measured)))
    if predicted.assumed:
        parts.append(
            translate("Predicted", "From data sheets, not measured by Tune: {0}.").format(_named(predicted.assumed))
        )
    if predicted.hit_rate is not None:
        parts.append(
            translate("Predicted", "Assumed: typical expert popularity, so that {0} slots hit {1}%;").format(
                number(predicted.slots, 0), number(100 * predicted.hit_rate, 0)
            )
        )
    else:
        parts.append(translate("Predicted", "Assumed: typical expert popularity;"))
    parts.append(translate("Predicted", "no other program is running."))
    return " ".join(parts)


def _named(groups: tuple[str, ...]) -> str:
    names = {
        "cpu": translate("Predicted", "processor and RAM"),
        "gpu": translate("Predicted", "graphics card"),
        "link": translate("Predicted", "PCIe"),
        "disk": translate("Predicted", "disk"),
    }
    return ", ".join(names.get(group, group) for group in groups)
