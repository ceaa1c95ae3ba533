"""Lanes and names of spans, encoded as small integers.

What lanes there are stands in `engine.common.lanes`; the simulator has those of work, too, so that a predicted timeline
can be shown under a recorded one.
"""

from __future__ import annotations

import re

from engine.common.lanes import TRACKS, track_number

PHASE, GPU, H2D, D2H = map(track_number, ("phase", "gpu", "h2d", "d2h"))
CPU_EXPERTS, CPU_ATTENTION, DISK = map(track_number, ("cpu_experts", "cpu_attention", "disk"))
SMALL_COPY, REQUESTS, SWEEPS, PICTURES = map(track_number, ("small_copy", "requests", "sweeps", "pictures"))
ALL_LANES = tuple(track.name for track in TRACKS)

NAMES = (
    "prefill",  # phase: a chunk of a prompt
    "decode",  # phase: from one token to the next
    "sample",  # phase: the first token, sampled from the prefill's logits
    "prompt",  # phase: tokenizing a conversation
    "attention",  # a single layer's attention
    "dense",  # everything between the experts of two layers: attention, norms, router
    "head",  # after the last experts: norm and logits
    "experts",  # `count` experts of one layer
    "fetch",  # weights for immediate use
    "post-fetch",  # weights of a miss, for later
    "prefetch",  # predicted weights
    "whole layer",  # all weights of a layer
    "routing",  # routing decisions with small hidden states
    "hidden states",  # to the CPU
    "results",  # of CPU experts, to the device
    "read",  # from disk, for immediate use
    "read ahead",  # from disk, for later
    "copy",  # any other
    "batch step",  # phase: one step of many sequences
    "finish",  # final sum of a layer's experts
    "keys and values",  # of a batch, between RAM and a device
    "graph",  # a captured segment of a step: `count` layers, maybe with experts and head; opaque inside
    "queued",  # a request that waits
    "reading",  # its prompt of `count` tokens is read; in a sweep, so many tokens of prompts
    "writing",  # its answer: `count` tokens; in a sweep, so many tokens of answers
    "job",  # a job's rows get `count` tokens of answers; in a sweep, so many tokens of rows, prompts included
    "kept in RAM",  # `count` tokens of a request's prompt that were read before, brought from where they are kept
    "kept on disk",
    "waiting elsewhere",  # a request to another server, until the first piece of its answer
    "written elsewhere",  # `count` tokens of its answer, or pieces where the server does not count
    "picture",  # `count` tokens are made of it
)
"""Names of spans.  Append new ones: recorded sessions contain the list they were written with."""

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
    QUEUED,
    READING,
    WRITING,
    JOB,
    KEPT_RAM,
    KEPT_DISK,
    ELSEWHERE,
    WRITTEN_ELSEWHERE,
    PICTURE,
) = range(len(NAMES))

FOR_LATER = frozenset((POST_FETCH, PREFETCH, READ_AHEAD))
"""Spans that no step waits for."""


_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def layer_number(module: str) -> int:
    """The decoder layer in a module's name; -1 if there is none."""
    found = _NUMBER.search(module)
    return int(found[1]) if found is not None else -1


def lane_name(lane: int) -> str:
    """Display name; an unknown number is shown as such."""
    return ALL_LANES[lane] if 0 <= lane < len(ALL_LANES) else f"lane {lane}"


def span_name(name: int) -> str:
    """Display name; an unknown number is shown as such."""
    return NAMES[name] if 0 <= name < len(NAMES) else f"span {name}"
