"""Lanes and names of spans, as small numbers while they are recorded and on their way.

Lanes are those of the simulator, so that a predicted timeline can stand under a recorded one.
"""

from __future__ import annotations

import re

from engine.planner.simulator.timeline import LANES

PHASE, GPU, H2D, D2H, CPU_EXPERTS, CPU_ATTENTION, DISK, SMALL_COPY = range(len(LANES))

NAMES = (
    "prefill",  # phase: a piece of a prompt
    "decode",  # phase: from one token to the next
    "sample",  # phase: the first token, chosen from what the prefill computed
    "prompt",  # phase: a conversation becomes tokens
    "attention",  # one layer's attention by itself
    "dense",  # what lies between the experts of one layer and those of the next: attention, norms, router
    "head",  # what follows the last experts: norms, the output's logits
    "experts",  # experts of one layer: `count` of them
    "fetch",  # weights that are computed with at once
    "post-fetch",  # weights of a miss, for later
    "prefetch",  # weights that were predicted
    "whole layer",  # weights of a layer that is fetched whole
    "routing",  # what the router chose, and small hidden states with it
    "hidden states",  # to the CPU
    "results",  # of the CPU's experts, to the device
    "read",  # from disk, somebody waits
    "read ahead",  # from disk, for later
    "copy",  # any other
    "batch step",  # phase: one step of many sequences
    "finish",  # sums of a layer that are put together
    "keys and values",  # of a batch, between RAM and a device
    "graph",  # a captured piece of a step: `count` layers, maybe with experts and head; its inside cannot be seen
)
"""Names of spans.  New ones come at the end: recorded sessions keep the list they were written with."""

(
    PREFILL,
    DECODE,
    SAMPLE,
    PROMPT,
    ATTENTION,
    DENSE,
    HEAD,
    EXPERTS,
    FETCH,
    POST_FETCH,
    PREFETCH,
    WHOLE_LAYER,
    ROUTING,
    HIDDEN,
    RESULTS,
    READ,
    READ_AHEAD,
    COPY,
    BATCH_STEP,
    FINISH,
    KEYS_VALUES,
    GRAPH,
) = range(len(NAMES))

FOR_LATER = frozenset((POST_FETCH, PREFETCH, READ_AHEAD))
"""Work that no step waits for."""


_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def layer_number(module: str) -> int:
    """Number of the decoder layer that the module of this name is part of; -1 if its name has none."""
    found = _NUMBER.search(module)
    return int(found[1]) if found is not None else -1


def lane_name(lane: int) -> str:
    """For people; a number that nobody knows is shown as it is."""
    return LANES[lane] if 0 <= lane < len(LANES) else f"lane {lane}"


def span_name(name: int) -> str:
    """For people; a number that nobody knows is shown as it is."""
    return NAMES[name] if 0 <= name < len(NAMES) else f"span {name}"
