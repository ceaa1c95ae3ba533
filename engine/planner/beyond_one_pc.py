"""When one PC stops being sensible for a job: its time, its electricity, and what an endpoint would cost instead.

Pure arithmetic on what was planned or measured and on prices that the user knows.  An endpoint is measured, never
modelled: its speed is only used if somebody has timed it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_PCS = 8
"""More PCs than this are a cluster's work: somebody would have to look after them."""
LONGEST_S = 30 * DAY_S
"""A job that takes longer on one PC is not sensible there, whatever it costs."""
_MUCH = 1.5
"""A smaller difference of two costs is called about the same."""


@dataclass(frozen=True, slots=True)
class JobNeeds:
    """A job and what it may take.

    Attributes:
        rows: of the input.
        prompt_tokens, generated_tokens: of each row.
        deadline_s: when it has to be done; None if there is no hurry.
    """

    rows: int
    prompt_tokens: float
    generated_tokens: float
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "generated_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if self.prompt_tokens < 0 or (self.deadline_s is not None and not self.deadline_s > 0):
            raise ValueError("prompt_tokens must not be negative, and a deadline must be above 0")


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost; None where it is not known.

    Attributes:
        watts: of the PC while it answers, at the socket.
        per_kwh: of electricity.
        per_million_read, per_million_written: tokens of an endpoint.
        endpoint_tokens_per_s: that an endpoint was measured to write for this job.
        currency: of all prices.
    """

    watts: float | None = None
    per_kwh: float | None = None
    per_million_read: float | None = None
    per_million_written: float | None = None
    endpoint_tokens_per_s: float | None = None
    currency: str = ""

    def __post_init__(self) -> None:
        values = (self.watts, self.per_kwh, self.per_million_read, self.per_million_written, self.endpoint_tokens_per_s)
        if any(value is not None and not 0 <= value < math.inf for value in values):
            raise ValueError("prices, watts and speeds must not be negative")


@dataclass(frozen=True, slots=True)
class BeyondOnePc:
    """What a job takes on this PC and elsewhere.

    Attributes:
        seconds, kwh, cost: on this PC; energy and cost are None if watts or a price are not known.
        joules_per_token: for each token written.
        pcs: PCs like this one that would meet the deadline; 1 if this one does, or if there is none.
        endpoint_s, endpoint_cost: of the endpoint; None if not known.
        is_sensible: whether one PC is the place for it.
        sentence: all this for people.
    """

    seconds: float
    kwh: float | None
    joules_per_token: float | None
    cost: float | None
    pcs: int
    endpoint_s: float | None
    endpoint_cost: float | None
    is_sensible: bool
    sentence: str


def beyond_one_pc(needs: JobNeeds, tokens_per_s: float, prices: Prices = Prices()) -> BeyondOnePc:
    """Compares this PC with several and with an endpoint.

    Args:
        tokens_per_s: written tokens over the whole time of a batch job on this PC, reading prompts included: planned or
            measured.

    Raises:
        ValueError: the speed is not above 0.
    """
    if not 0 < tokens_per_s < math.inf:
        raise ValueError("the speed must be above 0")
    written, read = needs.rows * needs.generated_tokens, needs.rows * needs.prompt_tokens
    seconds = written / tokens_per_s
    kwh = None if prices.watts is None else prices.watts * seconds / 3.6e6
    cost = None if kwh is None or prices.per_kwh is None else kwh * prices.per_kwh
    joules = None if prices.watts is None else prices.watts / tokens_per_s
    pcs = 1 if needs.deadline_s is None else max(1, math.ceil(seconds / needs.deadline_s - 1e-9))
    there_s = written / prices.endpoint_tokens_per_s if prices.endpoint_tokens_per_s else None
    there = None
    if prices.per_million_written is not None or prices.per_million_read is not None:
        there = (read * (prices.per_million_read or 0.0) + written * (prices.per_million_written or 0.0)) / 1e6
    too_dear = cost is not None and there is not None and cost > _MUCH * there
    is_sensible = pcs == 1 and seconds <= LONGEST_S and not too_dear
    told = BeyondOnePc(seconds, kwh, joules, cost, pcs, there_s, there, is_sensible, "")
    sentence = " ".join(filter(None, (_here(needs, told, prices), _hurry(needs, told), _elsewhere(told, prices))))
    return BeyondOnePc(seconds, kwh, joules, cost, pcs, there_s, there, is_sensible, sentence)


def _here(needs: JobNeeds, told: BeyondOnePc, prices: Prices) -> str:
    rows = "1 row" if needs.rows == 1 else f"{needs.rows:,} rows"
    said = f"This PC answers {rows} in {span(told.seconds)}"
    if told.kwh is None or told.joules_per_token is None:
        return f"{said}."
    power = f"{_number(told.kwh)} kWh" if told.kwh >= 0.1 else f"{_number(1000 * told.kwh)} Wh"
    cost = f", {_money(told.cost, prices)}" if told.cost is not None else ""
    return f"{said}, with {power} ({_number(told.joules_per_token)} J per token{cost})."


def _hurry(needs: JobNeeds, told: BeyondOnePc) -> str:
    if needs.deadline_s is not None:
        limit = span(needs.deadline_s)
        if told.pcs == 1:
            return f"That is within {limit}: one PC is enough."
        if told.pcs <= MOST_PCS:
            return f"To be done within {limit}, {told.pcs} PCs like it have to share the rows: endpoints, or Ray."
        return (
            f"To be done within {limit} it would take {told.pcs:,} PCs like it: "
            "that is work for a server with large graphics cards, or for a cluster."
        )
    if told.seconds > LONGEST_S:
        return "That is more than a month: one PC is not the place for it."
    return ""


def _elsewhere(told: BeyondOnePc, prices: Prices) -> str:
    parts = []
    if told.endpoint_s is not None:
        faster = told.seconds / told.endpoint_s
        pace = f"{_number(faster)} times as fast" if faster >= 1 else f"{_number(1 / faster)} times slower"
        parts.append(f"takes {span(told.endpoint_s)}, {pace}")
    if told.endpoint_cost is not None:
        parts.append(f"costs {_money(told.endpoint_cost, prices)}")
    if not parts:
        return ""
    said = f"The endpoint {' and '.join(parts)}"
    if told.endpoint_cost is None or told.cost is None:
        return f"{said}."
    if told.cost > _MUCH * told.endpoint_cost:
        return f"{said}: less than the electricity here."
    if told.endpoint_cost > _MUCH * told.cost:
        return f"{said}: more than the electricity here, which is what running on this PC costs if you own it anyway."
    return f"{said}: about as much as the electricity here."


def _money(amount: float | None, prices: Prices) -> str:
    assert amount is not None
    text = f"{amount:,.2f}" if amount >= 0.005 else "less than 0.01"
    return f"{text} {prices.currency}".strip()


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def span(seconds: float) -> str:
    """A time for people: `40 s`, `12 min`, `5.5 h`, `3.2 days`."""
    for unit, length, most in (("s", 1.0, 90.0), ("min", 60.0, 5400.0), ("h", HOUR_S, 2 * DAY_S)):
        if seconds < most:
            amount = seconds / length
            return f"{amount:.0f} {unit}" if unit != "h" or amount >= 10 else f"{amount:.1f} {unit}"
    return f"{seconds / DAY_S:,.1f} days" if seconds < 100 * DAY_S else f"{seconds / DAY_S:,.0f} days"
