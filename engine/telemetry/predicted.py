"""A simulated timeline as engine records, to be drawn and exported like recorded ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from engine.common.lanes import track_number
from engine.planner.simulator.sweeps import Span
from engine.telemetry import lanes
from engine.telemetry.records import COUNTERS, SPAN, STEP, Records, no_spans, no_steps

MOST_SPANS = 400_000
MOST_STEPS = 4096
_CYCLE = 12
"""Decode steps at the end of a simulation that are repeated for a longer answer: by then its cache is warm."""
_REQUEST = 1
_ANY_LANE: Mapping[str, int] = MappingProxyType(
    {
        "prefill": lanes.PREFILL,
        "decode": lanes.DECODE,
        "batch step": lanes.BATCH_STEP,
        "attention": lanes.ATTENTION,
        "projections": lanes.DENSE,
        "dense layer": lanes.DENSE,
        "head": lanes.HEAD,
        "experts": lanes.EXPERTS,
        "expert": lanes.EXPERTS,
        "activations": lanes.HIDDEN,
        "hidden": lanes.HIDDEN,
        "qkv": lanes.HIDDEN,
        "results": lanes.RESULTS,
        "post-fetch": lanes.POST_FETCH,
        "prefetch": lanes.PREFETCH,
        "weights": lanes.WHOLE_LAYER,
        "attention weights": lanes.WHOLE_LAYER,
        "page": lanes.WHOLE_LAYER,
    }
)
"""The simulator's span names; others, such as transfers of keys and values, become `copy`."""
_READ_LATER = ("weights", "page", "attention weights", "prefetch")


def predicted_records(spans: Sequence[Span], *, first_layer: int = 0) -> tuple[Records, Records]:
    """(spans, steps) of a simulation, starting at 0 ns.

    Hits are experts computed on the card without a fetch in the same step; a step is a phase of the simulation.

    Args:
        first_layer: the decoder layer that the simulation calls 0: the number of dense layers before it.
    """
    if not spans:
        return no_spans(), no_steps()
    phases = sorted((span for span in spans if span.lane == "phase"), key=lambda span: span.start)
    starts = [span.start for span in phases]
    rows = []
    counted = [dict.fromkeys(COUNTERS, 0) for _ in phases]
    for span in spans:
        # Work issued for the next pass before this one ends counts for this one.
        phase = max(bisect_right(starts, span.start) - 1, 0)
        layer = span.layer + first_layer if span.layer >= 0 else -1
        name = _name(span)
        times = _nanoseconds(span.start), _nanoseconds(span.end)
        of_what = (span.nbytes, _REQUEST, phase, layer, span.expert, span.count)
        rows.append((*times, *of_what, track_number(span.lane), span.card, name))
        for counter, amount in _amounts(span, name) if phases else ():
            counted[phase][counter] += amount
    steps = []
    for number, span in enumerate(phases):
        amounts = (max(amount, 0) for amount in counted[number].values())
        whose = (_REQUEST, number, _name(span), span.count)
        steps.append((_nanoseconds(span.start), _nanoseconds(span.end), *whose, *amounts))
    return np.array(rows, SPAN), np.array(steps, STEP) if steps else no_steps()


def _name(span: Span) -> int:
    if span.lane == "disk":
        return lanes.READ_AHEAD if span.name in _READ_LATER else lanes.READ
    if span.lane == "h2d" and span.name in ("expert", "experts"):
        return lanes.FETCH
    return _ANY_LANE.get(span.name, lanes.COPY)


def _amounts(span: Span, name: int) -> Iterable[tuple[str, int]]:
    """(counter, this span's increment)."""
    if name == lanes.EXPERTS:
        yield ("on_cpu" if span.lane == "cpu_experts" else "hits"), span.count
    elif name == lanes.FETCH:
        yield "fetched", span.count
        yield "hits", -span.count
    elif name == lanes.POST_FETCH:
        yield "post_fetches", span.count
    elif name == lanes.PREFETCH:
        yield "prefetched", span.count
    if span.nbytes and span.lane in ("h2d", "d2h", "disk"):
        yield f"{span.lane}_bytes", span.nbytes


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def lengthened(spans: Records, steps: Records, tokens: int) -> tuple[Records, Records]:
    """Spans and steps of `tokens` decode steps: those that were simulated, and the last of them over and over.

    Fewer if the spans would be too many; those that were simulated beyond `tokens` are left out.
    """
    phases = np.flatnonzero(steps["name"] == lanes.DECODE)
    if not len(phases):
        return spans, steps
    first, have = int(phases[0]), len(phases)
    cycle = min(_CYCLE, have)
    per_cycle = max(int((spans["step"] >= first + have - cycle).sum()), 1)
    tokens = min(tokens, have + cycle * (max(MOST_SPANS - len(spans), 0) // per_cycle), MOST_STEPS - first)
    if tokens <= have:
        return spans[spans["step"] < first + tokens], steps[: first + tokens]
    begin = first + have - cycle
    took_ns = int(steps["end_ns"][-1] - steps["start_ns"][begin])
    all_spans, all_steps = [spans], [steps]
    for turn in range(1, -(-(tokens - have) // cycle) + 1):
        for records, every in ((spans, all_spans), (steps, all_steps)):
            again = records[records["step"] >= begin].copy()
            again["start_ns"] += turn * took_ns
            again["end_ns"] += turn * took_ns
            again["step"] += turn * cycle
            every.append(again[again["step"] < first + tokens])
    return np.concatenate(all_spans), np.concatenate(all_steps)
