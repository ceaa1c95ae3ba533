"""All published speeds beside their predictions, and how far the two are apart."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.planner.rivals.prediction import FACTORS, hit_rate, predicted_tokens_per_s
from engine.planner.rivals.published import PublishedSpeed, read_rivals


@dataclass(frozen=True, slots=True)
class ComparedSpeed:
    """A published speed and its prediction.

    Attributes:
        published: what its source says.
        tokens_per_s: predicted.
        hit_rate: that the prediction rests on.
        fitted: whether the factors were chosen with it.
    """

    published: PublishedSpeed
    tokens_per_s: float
    hit_rate: float
    fitted: bool

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.tokens_per_s / self.published.tokens_per_s


@dataclass(frozen=True, slots=True)
class Order:
    """How well predictions rank what a source compares.

    Attributes:
        group: the comparison.
        pairs: of its results; right: those that the prediction ranks as published.
    """

    group: str
    pairs: int
    right: int

    @property
    def correlation(self) -> float:
        """Kendall's tau: 1 if all pairs are right, -1 if none is."""
        return 2 * self.right / self.pairs - 1


def all_speeds() -> list[ComparedSpeed]:
    """All published speeds, predicted, in the order of their file."""
    return [
        ComparedSpeed(speed, predicted_tokens_per_s(speed), hit_rate(speed), fitted=number % 2 == 0)
        for number, speed in enumerate(read_rivals())
    ]


def median_error(speeds: Sequence[ComparedSpeed]) -> float:
    """Median of |predicted / published - 1|."""
    return statistics.median(abs(speed.ratio - 1) for speed in speeds)


def orders(speeds: Sequence[ComparedSpeed]) -> list[Order]:
    """The order within each comparison of at least two results; no source compares with another."""
    groups: dict[str, list[ComparedSpeed]] = {}
    for speed in speeds:
        groups.setdefault(group_of(speed.published), []).append(speed)
    found = []
    for group, members in groups.items():
        pairs = list(itertools.combinations(members, 2))
        right = sum(
            (one.tokens_per_s - other.tokens_per_s) * (one.published.tokens_per_s - other.published.tokens_per_s) > 0
            for one, other in pairs
        )
        if pairs:
            found.append(Order(group, len(pairs), right))
    return found


def group_of(speed: PublishedSpeed) -> str:
    """The comparison that a result is part of: what one source measured of one model."""
    return f"{speed.group} ({speed.source})"


def document(speeds: Sequence[ComparedSpeed]) -> dict[str, object]:
    """Everything as one JSON-like document."""
    ranked = orders(speeds)
    return {
        "results": [_entry(speed) for speed in speeds],
        "factors": [{"name": each.name, "value": each.value, "meaning": each.meaning} for each in FACTORS],
        "median_error": {
            "all": median_error(speeds),
            "fitted": median_error([speed for speed in speeds if speed.fitted]),
            "others": median_error([speed for speed in speeds if not speed.fitted]),
        },
        "orders": [
            {"group": each.group, "pairs": each.pairs, "right": each.right, "correlation": each.correlation}
            for each in ranked
        ],
        "pairs": sum(each.pairs for each in ranked),
        "pairs_right": sum(each.right for each in ranked),
    }


def _entry(speed: ComparedSpeed) -> dict[str, object]:
    published = speed.published
    return {
        "program": published.program,
        "group": published.group,
        "result": published.result,
        "model": published.model.name,
        "machine": published.machine.description,
        "assumed": published.machine.source,
        "published": published.tokens_per_s,
        "predicted": round(speed.tokens_per_s, 4),
        "ratio": round(speed.ratio, 4),
        "hit_rate": round(speed.hit_rate, 4),
        "fitted": speed.fitted,
        "by": published.by,
        "source": published.source,
        "note": published.note,
    }
