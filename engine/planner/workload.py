"""The work that a plan is made for."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences to be continued.

    Attributes:
        name: shown to users.
        prompt_tokens: of each sequence, including padding if the schedule pads.
        generated_tokens: of each sequence.
        sequences: independent prompts.
        beams: hypotheses per sequence; 1 is plain sampling.
    """

    name: str
    prompt_tokens: int
    generated_tokens: int
    sequences: int = 1
    beams: int = 1

    @property
    def tokens_out(self) -> int:
        """Tokens delivered: only those of the best hypothesis."""
        return self.sequences * self.generated_tokens

    @property
    def mean_context(self) -> float:
        """Mean number of context tokens of a decode step."""
        return self.prompt_tokens + (self.generated_tokens + 1) / 2


CHAT = Workload("chat", prompt_tokens=128, generated_tokens=128)
LONG_PREFILL = Workload("long prefill", prompt_tokens=4096, generated_tokens=16)
BEAM = Workload("beam", prompt_tokens=32, generated_tokens=64, beams=8)
BATCH = Workload("batch", prompt_tokens=256, generated_tokens=64, sequences=512)
_TEXT = re.compile(r"(\d{1,7})x(\d{1,7})(?:x(\d{1,6}))?(?:x(\d{1,3}))?")
WORKLOADS = {"chat": CHAT, "long-prefill": LONG_PREFILL, "beam": BEAM, "batch": BATCH}
"""The four workloads that plans are compared on."""


def parse_workload(text: str) -> Workload:
    """One of `WORKLOADS`, or `PROMPTxGENERATED[xSEQUENCES[xBEAMS]]` in tokens, such as `512x32x64`.

    Raises:
        ValueError: it is neither, or a number is 0.
    """
    if text in WORKLOADS:
        return WORKLOADS[text]
    match = _TEXT.fullmatch(text)
    numbers = [int(part) for part in match.groups() if part] if match else []
    if not numbers or not all(numbers):
        raise ValueError(f"{text!r} is not a workload: use {', '.join(WORKLOADS)}, or for example 512x32x64")
    return Workload(text, *numbers)
