"""How a job will run and how fast, in words, with the uncertainty."""

from __future__ import annotations

from app.views.batch.figures import clock_text, rate_figure, translate
from app.widgets.quantities import count, percent
from engine.batch_files.messages import BatchPlanned
from engine.planner.batch_prediction import Bottleneck


def plan_text(plan: BatchPlanned, now_s: float, alone_tokens_per_s: float = 0.0) -> str:
    """A job before its start: rows that share weights, rate, end, bottleneck, and the uncertainty.

    Args:
        alone_tokens_per_s: one row at a time; 0 if unknown.
    """
    shared = shared_text(plan.rows_together) if plan.rows > 1 else translate("Batch", "One row")
    rate = translate("Batch", "{0} to {1} tokens/s").format(*_rates(plan))
    if plan.is_measured:
        first, last = clock_text(now_s + plan.seconds_low), clock_text(now_s + plan.seconds_high)
        end = translate("Batch", "done between {0} and {1}").format(first, last)
        if first == last:
            end = translate("Batch", "done at about {0}").format(first)
        sure = translate("Batch", "Measured on the trial rows, ±{0}.").format(percent(_off(plan)))
    else:
        end = translate("Batch", "done by {0} even if every answer takes all {1} tokens").format(
            clock_text(now_s + plan.seconds_high), count(round(plan.tokens_per_row))
        )
        sure = translate("Batch", "Predicted, ±{0}; a trial of the first rows is more exact.").format(
            percent(_off(plan))
        )
    parts = [f"{shared}; {rate}; {end}.", limit_text(plan.bottleneck), sure]
    if alone_tokens_per_s > 0 and plan.rows_together > 1:
        one_by_one = translate("Batch", "One row at a time: {0} tokens/s.")
        parts.insert(2, one_by_one.format(rate_figure(_two_digits(alone_tokens_per_s))))
    return " ".join(part for part in parts if part)


def shared_text(rows: int) -> str:
    """How many rows share each weight load; the beginning of a sentence."""
    if rows <= 1:
        return translate("Batch", "Rows are answered one at a time")
    return translate("Batch", "{0} rows share each load of a layer's weights").format(count(rows))


def planned_text(plan: BatchPlanned, measured: float = 0.0) -> str:
    """The prediction, next to what a running job measures.

    Args:
        measured: tokens/s so far; 0 if unknown.  A prediction that the measurement contradicts is reported as wrong,
            and its bottleneck is left out.
    """
    low, high = _rates(plan)
    if measured > 0 and measured < plan.tokens_per_s_low:
        words = translate(
            "Batch",
            "Measured {2} tokens/s, slower than the {0} to {1} predicted: other programs may be busy, or rows longer "
            "than the first ones. The time left is based on the measured rate.",
        )
        return words.format(low, high, rate_figure(measured))
    if measured > plan.tokens_per_s_high:
        words = translate(
            "Batch",
            "Measured {2} tokens/s, faster than the {0} to {1} predicted. The time left is based on the measured rate.",
        )
        return words.format(low, high, rate_figure(measured))
    if measured > 0:
        return limit_text(plan.bottleneck)
    expected = translate("Batch", "Expected: {0} to {1} tokens/s.").format(low, high)
    return f"{expected} {limit_text(plan.bottleneck)}".strip()


def limit_text(bottleneck: str) -> str:
    """A job's bottleneck, as a sentence; empty if this version does not know it."""
    words: dict[str, str] = {
        Bottleneck.ARITHMETIC: translate("Batch", "Limited by CPU compute."),
        Bottleneck.WEIGHTS: translate("Batch", "Limited by reading weights from RAM."),
        Bottleneck.ATTENTION: translate("Batch", "Limited by attention on the CPU."),
        Bottleneck.DISK: translate("Batch", "Limited by reading experts from disk."),
        Bottleneck.LINK: translate("Batch", "Limited by the link to the card."),
        Bottleneck.CARD: translate("Batch", "Limited by GPU compute."),
    }
    return words.get(bottleneck, "")


def _rates(plan: BatchPlanned) -> tuple[str, str]:
    return rate_figure(_two_digits(plan.tokens_per_s_low)), rate_figure(_two_digits(plan.tokens_per_s_high))


def _two_digits(value: float) -> float:
    """More digits would claim more precision than there is."""
    return float(f"{value:.2g}")


def _off(plan: BatchPlanned) -> float:
    both = plan.tokens_per_s_low + plan.tokens_per_s_high
    return round((plan.tokens_per_s_high - plan.tokens_per_s_low) / both, 2) + 1e-9 if both > 0 else 0.0
